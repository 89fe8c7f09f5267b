"""Beam search through the whole engine, in float64: sequences, order, ends and scores of the oracle, in any pool."""

from __future__ import annotations

from itertools import product

import pytest

from minipaged.beam_search_params import BeamSearchParams
from minipaged.sampling_params import SamplingParams
from tests.beam_oracle import beam_search
from tests.property.preempt_at_random import PreemptAtRandom
from tests.tiny_engine import make_engine
from tests.tiny_llama import random_prompt, tiny_llama

SHAPES = ["gqa", "mqa", "biases", "llama3_rope"]
PENALTIES = (0.5, 1.0, 2.0)
STOPPING = (False, True, "never")
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {shape: tiny_llama(shape).save(tmp_path_factory.mktemp(shape)) for shape in SHAPES}


def oracle(shape, prompt, eos, width, penalty, stopping):
    def logprobs(tokens):
        key = (shape, tuple(prompt), tuple(tokens))
        if key not in _LOGPROBS:
            _LOGPROBS[key] = tiny_llama(shape).logits([*prompt, *tokens])[-1].log_softmax(-1).tolist()
        return _LOGPROBS[key]

    return beam_search(logprobs, width, MAX_TOKENS, eos, penalty, stopping)


_LOGPROBS: dict[tuple, list[float]] = {}


def likely_ends(shape, prompt):
    """Two ids that occur inside the beams: from the best sequences of a search that nothing ends."""
    found = oracle(shape, prompt, (), 4, 1.0, False).found
    return (found[0].tokens[4], found[1].tokens[2])


def assert_equals_oracle(output, result):
    assert len(output.outputs) == len(result.found)
    for ours, theirs in zip(output.outputs, result.found, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.tokens, theirs.reason)
        assert ours.cumulative_logprob == pytest.approx(theirs.total, abs=1e-9)


@pytest.mark.parametrize("pressure", ["roomy", "tight, preempted, chunked"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_setting_equals_the_oracle_in_one_mixed_batch(directories, shape, pressure):
    """4 shapes × 2 prompts × 36 settings, all in one engine, with greedy and sampled requests between them."""
    prompts = [random_prompt(length, seed=length) for length in (5, 8)]
    ends = likely_ends(shape, prompts[0]) + likely_ends(shape, prompts[1])
    directory = directories[shape]
    if pressure == "roomy":
        engine = make_engine(directory, 400, eos_token_ids=ends, max_num_seqs=64)
    else:
        policy = PreemptAtRandom(1, 0.2)
        small = {"block_size": 3, "max_num_seqs": 12, "max_num_batched_tokens": 12}
        engine = make_engine(directory, 40, policy, eos_token_ids=ends, **small)
    cases = {}
    for number, (prompt, width, penalty, stopping) in enumerate(product(prompts, (2, 3, 4, 5), PENALTIES, STOPPING)):
        cases[f"beam {number}"] = (prompt, width, penalty, stopping)
        params = BeamSearchParams(width, MAX_TOKENS, length_penalty=penalty, early_stopping=stopping)
        engine.add_request(f"beam {number}", {"prompt_token_ids": prompt}, params)
        if number % 9 == 0:
            engine.add_request(f"other {number}", {"prompt_token_ids": prompt}, SamplingParams(n=2, seed=number))
    done, ended = {}, 0
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.scheduler.check()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    for name, (prompt, width, penalty, stopping) in cases.items():
        result = oracle(shape, prompt, ends, width, penalty, stopping)
        assert_equals_oracle(done[name], result)
        ended += result.ended_inside > 0
    assert ended > 0.9 * len(cases), "ends of sequence must occur inside the beams"


def test_one_beam_is_greedy(directories):
    engine = make_engine(directories["gqa"], 64)
    prompt = {"prompt_token_ids": random_prompt(7, seed=1)}
    engine.add_request("beam", prompt, BeamSearchParams(1, 12))
    engine.add_request("greedy", prompt, SamplingParams(temperature=0, max_tokens=12))
    done = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
    assert done["beam"].outputs[0].token_ids == done["greedy"].outputs[0].token_ids
