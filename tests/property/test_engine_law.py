"""The engine law with a real model: whatever the pool, the blocks, the chunks, the preemptions and the other requests,
each request gets the tokens and the log-probabilities that it gets alone in a large engine.

Tiny Llamas that attend, in float64, on pools full of NaN and shuffled free lists.
"""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.beam_search_params import BeamSearchParams
from minipaged.blocks.block_table import blocks_for
from minipaged.sampling_params import SamplingParams
from tests.property.preempt_at_random import PreemptAtRandom
from tests.tiny_engine import make_engine
from tests.tiny_llama import random_prompt, tiny_llama

SHAPES = ["gqa", "mha", "llama3_rope"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {shape: tiny_llama(shape).save(tmp_path_factory.mktemp(shape)) for shape in SHAPES}


def run(engine, requests):
    """Finished outputs in the order of the requests."""
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    done = {}
    while engine.has_unfinished_requests():
        done.update((int(output.request_id), output) for output in engine.step() if output.finished)
        engine.scheduler.check()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return [done[i] for i in range(len(requests))]


def most_blocks(prompt, params, block_size):
    """What a request can hold at most: every sequence at its full length, the prompt's whole blocks shared."""
    shared = len(prompt) // block_size
    width = params.beam_width if isinstance(params, BeamSearchParams) else params.n
    return shared + width * (blocks_for(len(prompt) + params.max_tokens, block_size) - shared)


def logprobs(output):
    """All log-probabilities of an output as one list of (token, number)."""
    positions = [*(output.prompt_logprobs or [])[1:]]
    for answer in output.outputs:
        positions += answer.logprobs or []
    return [(token, entry.logprob) for position in positions for token, entry in position.items()]


def ends(output):
    return [(answer.token_ids, answer.finish_reason, answer.stop_reason) for answer in output.outputs]


def assert_same(ours, solo):
    for left, right in zip(ours, solo, strict=True):
        assert ends(left) == ends(right)
        assert [token for token, _ in logprobs(left)] == [token for token, _ in logprobs(right)]
        assert [number for _, number in logprobs(left)] == pytest.approx(
            [number for _, number in logprobs(right)], abs=1e-9
        )


@functools.cache
def solo_engine(directory):
    return make_engine(directory, num_blocks=64)


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
        "logit_bias": st.dictionaries(st.integers(0, 60), st.floats(-5, 5), max_size=3),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
        "ignore_eos": st.booleans(),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True))
    fields = {name: draw(optional[name]) for name in chosen}
    return SamplingParams(
        n=draw(st.integers(1, 3)) if temperature > 0 else 1,
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


@given(
    shape=st.sampled_from(SHAPES),
    requests=requests,
    block_size=st.integers(1, 9),
    spare_blocks=st.integers(0, 4),
    budget=st.integers(5, 40),
    backend=st.sampled_from(["gather", "gather", "reference"]),
    preempt=st.sampled_from([0.0, 0.1, 0.5]),
    caching=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=max(80, settings.default.max_examples // 4))
def test_a_request_gets_what_it_gets_alone(
    directories, shape, requests, block_size, spare_blocks, budget, backend, preempt, caching, seed
):
    needed = max(most_blocks(prompt, params, block_size) for prompt, params in requests)
    num_blocks = needed + spare_blocks
    engine = make_engine(
        directories[shape],
        num_blocks,
        PreemptAtRandom(seed, preempt),
        random.Random(seed).sample(range(num_blocks), num_blocks),
        block_size=block_size,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        attention_backend=backend,
        enable_prefix_caching=caching,
    )
    solo = [run(solo_engine(directories[shape]), [request])[0] for request in requests]
    assert_same(run(engine, requests), solo)


@pytest.mark.slow
@given(requests=requests, seed=st.integers(0, 2**32))
def test_a_request_gets_what_it_gets_alone_in_a_pool_that_thrashes(directories, requests, seed):
    """One-token blocks, a pool for the largest request alone, half of all steps put somebody out."""
    num_blocks = max(most_blocks(prompt, params, 1) for prompt, params in requests)
    policy = PreemptAtRandom(seed, 0.5)
    engine = make_engine(directories["gqa"], num_blocks, policy, block_size=1, max_num_seqs=5, max_num_batched_tokens=7)
    solo = [run(solo_engine(directories["gqa"]), [request])[0] for request in requests]
    assert_same(run(engine, requests), solo)
