"""The engine law with a real model: whatever the pools, the blocks, the chunks, the preemptions by swap or recompute,
the aborts and the other requests, each request gets the text, the tokens and the log-probabilities that it gets alone
in a large engine.

Tiny Llamas that attend, in float64, on pools full of NaN and shuffled free lists.
"""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.beam_search_params import BeamSearchParams
from minipaged.engine_args import PREEMPTION_MODES
from minipaged.sampling_params import SamplingParams
from tests.property.preempt_at_random import PreemptAtRandom
from tests.tiny_engine import make_engine, tiny_tokenizer
from tests.tiny_llama import random_prompt, tiny_llama

SHAPES = ["gqa", "mha", "llama3_rope"]
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {shape: tiny_llama(shape).save(tmp_path_factory.mktemp(shape)) for shape in SHAPES}


def run(engine, requests, aborts=()):
    """Finished outputs in the order of the requests. `aborts` are (step, request) pairs."""
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    done, step = {}, 0
    while engine.has_unfinished_requests():
        engine.abort_request([str(i) for at, i in aborts if at == step])
        for output in engine.step():
            if output.finished:
                assert done.setdefault(int(output.request_id), output) is output, "reported finished twice"
        engine.scheduler.check()
        step += 1
    for pool in (engine.blocks, engine.scheduler.host):
        assert pool.num_free == pool.num_blocks
        assert not pool.tables()
    return [done[i] for i in range(len(requests))]


def flat(positions):
    """Log-probabilities of several positions as one list of (token, number)."""
    return [(token, entry.logprob) for position in positions or [] for token, entry in (position or {}).items()]


def logprobs(output):
    """All log-probabilities of an output."""
    return flat(output.prompt_logprobs) + [pair for answer in output.outputs for pair in flat(answer.logprobs)]


def ends(output):
    return [(answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason) for answer in output.outputs]


def assert_same(ours, solo):
    for left, right in zip(ours, solo, strict=True):
        if any(answer.finish_reason == "abort" for answer in left.outputs):
            assert_beginning(left, right)
        else:
            assert ends(left) == ends(right)
            assert_same_logprobs(logprobs(left), logprobs(right))


def assert_same_logprobs(left, right):
    assert [token for token, _ in left] == [token for token, _ in right]
    assert [number for _, number in left] == pytest.approx([number for _, number in right], abs=1e-9)


def assert_beginning(aborted, solo):
    """What was cut off is a beginning of what would have come. (Cut-off beams are not: the best may yet change.)"""
    if isinstance(aborted.sampling_params, BeamSearchParams):
        return
    if aborted.sampling_params.num_samples == aborted.sampling_params.n:  # else others may have been the best
        for answer, whole in zip(aborted.outputs, solo.outputs, strict=True):
            assert whole.token_ids[: len(answer.token_ids)] == answer.token_ids
            assert whole.text.startswith(answer.text)
            scores = flat(answer.logprobs)
            assert_same_logprobs(scores, flat(whole.logprobs)[: len(scores)])
    scores = flat(aborted.prompt_logprobs)
    assert_same_logprobs(scores, flat(solo.prompt_logprobs)[: len(scores)])


@functools.cache
def solo_engine(directory):
    return make_engine(directory, num_blocks=64, tokenizer=TOKENIZER)


@st.composite
def sampling_params(draw):
    temperature = draw(st.sampled_from([0.0, 0.7, 1.0, 3.0]))
    optional = {
        "top_k": st.sampled_from([1, 5, 20]),
        "top_p": st.floats(0.3, 1.0),
        "min_p": st.floats(0.0, 0.3),
        "repetition_penalty": st.floats(0.7, 1.5),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(st.integers(0, 60), max_size=8),
        "stop": st.lists(st.text("abcd", min_size=2, max_size=4), max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 60), st.floats(-5, 5), max_size=3),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
        "ignore_eos": st.booleans(),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True))
    fields = {name: draw(optional[name]) for name in chosen}
    n = draw(st.integers(1, 3)) if temperature > 0 else 1
    return SamplingParams(
        n=n,
        best_of=n + draw(st.integers(0, 1)) if n > 1 else None,
        temperature=temperature,
        seed=draw(st.integers(0, 2**40)),
        max_tokens=draw(st.integers(4, 14)),
        **fields,
    )


beam_params = st.builds(
    BeamSearchParams,
    beam_width=st.integers(1, 3),
    max_tokens=st.integers(4, 10),
    length_penalty=st.sampled_from([0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
)


requests = st.lists(
    st.tuples(  # prompts of one seed begin alike
        st.integers(1, 20), st.integers(0, 3), st.one_of(sampling_params(), sampling_params(), beam_params)
    ).map(lambda drawn: (random_prompt(drawn[0], drawn[1]), drawn[2])),
    min_size=1,
    max_size=5,
)


@functools.cache
def large_engine(directory, block_size):
    return make_engine(directory, num_blocks=400, block_size=block_size, tokenizer=TOKENIZER)


def most_blocks(directory, requests, block_size):
    """The smallest pool in which each of the requests can run to its end."""
    large = large_engine(directory, block_size)
    return max(large.max_blocks_needed({"prompt_token_ids": prompt}, params) for prompt, params in requests)


@given(
    shape=st.sampled_from(SHAPES),
    requests=requests,
    block_size=st.integers(1, 9),
    spare_blocks=st.integers(0, 4),
    num_host_blocks=st.sampled_from([0, 1, 6, 50]),
    budget=st.integers(5, 40),
    backend=st.sampled_from(["gather", "gather", "reference"]),
    preempt=st.sampled_from([0.0, 0.1, 0.5]),
    mode=st.sampled_from(PREEMPTION_MODES),
    caching=st.booleans(),
    aborts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), max_size=2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=max(300, settings.default.max_examples))
def test_a_request_gets_what_it_gets_alone(
    directories,
    shape,
    requests,
    block_size,
    spare_blocks,
    num_host_blocks,
    budget,
    backend,
    preempt,
    mode,
    caching,
    aborts,
    seed,
):
    num_blocks = most_blocks(directories[shape], requests, block_size) + spare_blocks
    engine = make_engine(
        directories[shape],
        num_blocks,
        PreemptAtRandom(seed, preempt),
        random.Random(seed).sample(range(num_blocks), num_blocks),
        num_host_blocks=num_host_blocks,
        tokenizer=TOKENIZER,
        block_size=block_size,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        attention_backend=backend,
        enable_prefix_caching=caching,
        preemption_mode=mode,
    )
    solo = [run(solo_engine(directories[shape]), [request])[0] for request in requests]
    assert_same(run(engine, requests, aborts), solo)


@pytest.mark.slow
@given(requests=requests, mode=st.sampled_from(PREEMPTION_MODES), seed=st.integers(0, 2**32))
def test_a_request_gets_what_it_gets_alone_in_a_pool_that_thrashes(directories, requests, mode, seed):
    """One-token blocks, a pool for the largest request alone, half of all steps put somebody out."""
    num_blocks = most_blocks(directories["gqa"], requests, 1)
    engine = make_engine(
        directories["gqa"],
        num_blocks,
        PreemptAtRandom(seed, 0.5),
        num_host_blocks=num_blocks // 2,
        tokenizer=TOKENIZER,
        block_size=1,
        max_num_seqs=5,
        max_num_batched_tokens=7,
        preemption_mode=mode,
    )
    solo = [run(solo_engine(directories["gqa"]), [request])[0] for request in requests]
    assert_same(run(engine, requests), solo)
