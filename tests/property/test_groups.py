"""The engine law for whole engines, on a shadow worker: n samples, beams, early ends, shared beginnings, the prefix
cache on and off, hash collisions, any pool, any preemption, swap, any chunking, aborts, and steps that fail.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.beam_search_params import BeamSearchParams
from minipaged.blocks.eviction import EvictFewestHits, EvictLeastRecentlyUsed
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import PREEMPTION_MODES, EngineArgs
from minipaged.sampling_params import SamplingParams
from tests.beam_oracle import beam_search
from tests.property.preempt_at_random import PreemptAtRandom
from tests.shadow_worker import ShadowWorker, beam_logprobs, shadow_logprob, solo_tokens

EOS = (4, 11, 17)

requests = st.lists(
    st.fixed_dictionaries(
        {
            "family": st.integers(0, 2),  # requests of one family begin alike
            "length": st.sampled_from([1, 3, 6, 7, 8, 12, 13, 20]),
            "n": st.integers(1, 4),
            "max_tokens": st.integers(1, 12),
            "seed": st.integers(0, 3),
            "stops": st.lists(st.integers(0, 19), max_size=4),
            "scored": st.booleans(),
            "beams": st.booleans(),
            "salt": st.sampled_from(["", "", "mine"]),
            "arrival": st.integers(0, 12),
            "abort_after": st.one_of(st.none(), st.integers(0, 12)),
        }
    ),
    min_size=2,
    max_size=6,
).map(lambda drawn: sorted(drawn, key=lambda request: request["arrival"]))


class FailingWorker(ShadowWorker):
    """Raises in some steps, half of the time with its writes done and half of the time with garbage in their place."""

    fail_at: frozenset[int] = frozenset()

    def execute(self, plan):
        if plan.step in self.fail_at:
            for _, block in (*plan.swap_out, *plan.swap_in):
                pool = self.host_pool if plan.swap_out else self.pool
                pool[block] = [999] * self.block_size
            for row in plan.work:
                for position in range(row.start, row.start + len(row.token_ids)):
                    block = row.block_table[position // self.block_size]
                    self.pool[block][position % self.block_size] = 999
            raise RuntimeError("a failed step")
        return super().execute(plan)


def prompt_of(request):
    return tuple((request["family"] * 7 + j) % 20 for j in range(request["length"]))


def expected_beams(request):
    def logprobs(tokens):
        return beam_logprobs((*prompt_of(request), *tokens), 20)

    found = beam_search(logprobs, request["n"], request["max_tokens"], EOS).found
    return [(one.tokens, one.reason) for one in found]


def expected_tokens(request, i):
    tokens = solo_tokens(prompt_of(request), request["seed"] + i, request["max_tokens"], vocab_size=20)
    ends = [at for at, token in enumerate(tokens) if token in request["stops"]]
    return list(tokens[: ends[0] + 1] if ends else tokens)


def params_of(request):
    if request["beams"]:
        return BeamSearchParams(request["n"], request["max_tokens"])
    return SamplingParams(
        n=request["n"],
        max_tokens=request["max_tokens"],
        seed=request["seed"],
        ignore_eos=True,
        stop_token_ids=request["stops"],
        prompt_logprobs=0 if request["scored"] else None,
    )


def most_blocks(request, block_size):
    args = EngineArgs(block_size=block_size, skip_tokenizer_init=True)
    large = LLMEngine(args, ShadowWorker(1000, block_size, vocab_size=20))
    return large.max_blocks_needed({"prompt_token_ids": prompt_of(request)}, params_of(request))


def run(engine, requests):
    """Requests arrive at their steps, and every law is checked at every step. Returns the outputs in order."""
    done, step = {}, 0
    arriving = list(enumerate(requests))
    while arriving or engine.has_unfinished_requests():
        while arriving and arriving[0][1]["arrival"] <= step:
            i, request = arriving.pop(0)
            prompt = {"prompt_token_ids": list(prompt_of(request)), "cache_salt": request["salt"]}
            engine.add_request(str(i), prompt, params_of(request))
        for i, request in enumerate(requests):
            if request["abort_after"] is not None and step == request["arrival"] + request["abort_after"]:
                engine.abort_request(str(i))
        for output in engine.step():
            if output.finished:
                assert int(output.request_id) not in done, "reported finished twice"
                done[int(output.request_id)] = output
        engine.scheduler.check()
        step += 1
        assert step < 5000, "no end in sight"
    for pool in (engine.blocks, engine.scheduler.host):
        assert pool.num_free == pool.num_blocks
        assert not pool.tables()
    return [done[i] for i in range(len(requests))]


@pytest.mark.parametrize("collide", [False, True], ids=["", "every key collides"])
@given(
    requests=requests,
    block_size=st.integers(1, 6),
    spare_blocks=st.integers(0, 20),
    budget=st.integers(8, 30),
    preempt=st.sampled_from([0.0, 0.1, 0.5]),
    mode=st.sampled_from(PREEMPTION_MODES),
    num_host_blocks=st.sampled_from([0, 1, 5, 100]),
    caching=st.booleans(),
    eviction=st.sampled_from([EvictLeastRecentlyUsed, EvictFewestHits]),
    fail_at=st.frozensets(st.integers(0, 40), max_size=2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=max(300, settings.default.max_examples))
def test_each_sample_gets_what_it_gets_alone(
    collide,
    requests,
    block_size,
    spare_blocks,
    budget,
    preempt,
    mode,
    num_host_blocks,
    caching,
    eviction,
    fail_at,
    seed,
):
    num_blocks = max(most_blocks(request, block_size) for request in requests) + spare_blocks
    args = EngineArgs(
        block_size=block_size,
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        preemption_mode=mode,
    )
    worker = FailingWorker(num_blocks, block_size, vocab_size=20, eos=EOS, num_host_blocks=num_host_blocks)
    worker.fail_at = fail_at
    engine = LLMEngine(
        args,
        worker,
        policy=PreemptAtRandom(seed, preempt),
        free_order=random.Random(seed).sample(range(num_blocks), num_blocks),
        eviction_policy=eviction() if caching else None,
    )
    key = (lambda parent_key, token_ids: b"the same") if collide else None
    with mock.patch("minipaged.blocks.prefix_cache.block_key", key) if collide else nullcontext():
        outputs = run(engine, requests)
    for request, output in zip(requests, outputs, strict=True):
        check_output(request, output)


def check_output(request, output):
    """What has come to its end is what it is alone; what was cut off is a beginning of that."""
    reasons = {answer.finish_reason for answer in output.outputs}
    cut_off = not reasons.isdisjoint({"error", "abort"})
    if request["beams"]:
        assert cut_off or [(a.token_ids, a.finish_reason) for a in output.outputs] == expected_beams(request)
        return
    for i, answer in enumerate(output.outputs):
        expected = expected_tokens(request, i)
        whole = answer.finish_reason not in ("error", "abort")
        assert answer.token_ids == (expected if whole else expected[: len(answer.token_ids)])
    if request["scored"]:
        scores = [entry.logprob for position in output.prompt_logprobs[1:] for entry in position.values()]
        expected = [shadow_logprob(prompt_of(request)[:k]) for k in range(1, request["length"])]
        assert scores == (expected[: len(scores)] if cut_off else expected)
