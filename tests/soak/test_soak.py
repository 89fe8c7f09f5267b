"""Thousands of requests of random shape through one small engine: no stall, nothing lost, nothing left behind.

Memory is measured as the number of Python objects that are alive whenever the engine has drained: tensors, tables,
detokenizers and cache entries are all among them.
"""

from __future__ import annotations

import gc
import random

import pytest

from minipaged.beam_search_params import BeamSearchParams
from minipaged.sampling_params import SamplingParams
from tests.property.preempt_at_random import PreemptAtRandom
from tests.tiny_engine import make_engine, tiny_tokenizer
from tests.tiny_llama import random_prompt, tiny_llama

NUM_REQUESTS = 2000
PER_ROUND = 100  # then the engine drains, and what is alive is counted
WARM_UP = 5  # rounds, after which nothing may grow


def random_params(rng: random.Random) -> SamplingParams | BeamSearchParams:
    if rng.random() < 0.15:
        return BeamSearchParams(beam_width=rng.randint(1, 3), max_tokens=rng.randint(1, 6))
    n = rng.choice([1, 1, 1, 2, 3])
    return SamplingParams(
        n=n,
        best_of=n + 1 if n > 1 and rng.random() < 0.3 else None,
        temperature=0.0 if n == 1 and rng.random() < 0.3 else 1.0,
        max_tokens=rng.randint(1, 12),
        stop=["ab", "dca"] if rng.random() < 0.3 else None,
        presence_penalty=rng.choice([0.0, 0.5]),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
    )


def serve_round(engine, rng: random.Random, round_number: int) -> tuple[int, int]:
    """Requests trickle in, some are aborted. Returns how many ended by themselves and how many were aborted."""
    todo = [f"{round_number}-{i}" for i in range(PER_ROUND)]
    open_requests: set[str] = set()
    ends = {"abort": 0, "other": 0}
    idle = 0
    while todo or engine.has_unfinished_requests():
        for _ in range(rng.randint(0, 3) if todo else 0):
            name = todo.pop()
            prompt = {
                "prompt_token_ids": random_prompt(rng.randint(1, 24), rng.randint(0, 5)),
                "cache_salt": rng.choice(["", name]),  # a salt that never comes again
            }
            engine.add_request(name, prompt, random_params(rng))
            open_requests.add(name)
            if not todo:
                break
        if open_requests and rng.random() < 0.05:
            engine.abort_request([rng.choice(sorted(open_requests)), "nobody"])
        before = engine.get_metrics().counts.num_computed_tokens
        for output in engine.step():
            if output.finished:
                open_requests.remove(output.request_id)  # a second end would raise
                reasons = {answer.finish_reason for answer in output.outputs}
                assert "error" not in reasons
                ends["abort" if "abort" in reasons else "other"] += 1
        idle = 0 if engine.get_metrics().counts.num_computed_tokens > before or not open_requests else idle + 1
        assert idle < 20, "a stall"  # several steps in a row may only put requests out
    assert not open_requests
    return ends["other"], ends["abort"]


@pytest.mark.parametrize("caching", [False, True])
def test_two_thousand_requests_leave_nothing_behind(tmp_path, caching):
    engine = make_engine(
        tiny_llama("gqa").save(tmp_path),
        num_blocks=24,
        policy=PreemptAtRandom(1, 0.05),
        num_host_blocks=8,
        tokenizer=tiny_tokenizer(),
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        enable_prefix_caching=caching,
    )
    rng = random.Random(2)
    alive, ended, aborted = [], 0, 0
    for round_number in range(NUM_REQUESTS // 2 // PER_ROUND):
        others, aborts = serve_round(engine, rng, round_number)
        ended, aborted = ended + others, aborted + aborts
        engine.scheduler.check()
        for pool in (engine.blocks, engine.scheduler.host):
            assert pool.num_free == pool.num_blocks
            assert not pool.tables()
        if caching:
            engine.prefixes.reset()  # else the cache's content differs from round to round
        gc.collect()
        alive.append(len(gc.get_objects()))
    assert ended + aborted == NUM_REQUESTS // 2
    assert aborted > 20
    counts = engine.get_metrics().counts
    assert counts.num_preemptions_by_swap > 20
    assert counts.num_preemptions_by_recompute > 20
    growth = alive[-1] - alive[WARM_UP - 1]
    assert growth < 30, f"objects alive after each round: {alive}"
