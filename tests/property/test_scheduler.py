"""The engine law on the control plane alone: whatever the pool, the budget and the preemptions, the same tokens.

The shadow worker's tokens depend on everything that a sequence reads through its block table, so these tests see a
wrong slot, a lost token and a stale table without any tensor. Every law of the scheduler is checked at every step
(driver.py).
"""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from minipaged.blocks.block_table import blocks_for
from minipaged.engine_args import PREEMPTION_MODES
from tests.property.preempt_at_random import PreemptAtRandom
from tests.shadow_worker import solo_tokens
from tests.unit.scheduling.driver import Driver

requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 12)),  # prompt length, max_tokens, arrival step
    min_size=1,
    max_size=8,
)


@given(
    requests=requests,
    block_size=st.integers(1, 8),
    spare_blocks=st.integers(0, 12),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 8),
    chunked=st.booleans(),
    preempt=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    mode=st.sampled_from(PREEMPTION_MODES),
    num_host_blocks=st.sampled_from([0, 1, 8, 100]),
    seed=st.integers(0, 2**32),
)
@example([(4, 4, 0), (4, 4, 0)], 4, 0, 1, 1, True, 0.0, "recompute", 0, 0)
def test_every_request_gets_the_tokens_it_gets_alone(
    requests, block_size, spare_blocks, budget, max_num_seqs, chunked, preempt, mode, num_host_blocks, seed
):
    rng = random.Random(seed)
    num_blocks = max(blocks_for(prompt + more, block_size) for prompt, more, _ in requests) + spare_blocks
    budget = max(budget, max_num_seqs) if chunked else max(budget, max_num_seqs, 50)
    driver = Driver(
        num_blocks,
        block_size,
        max_num_seqs,
        budget,
        chunked,
        PreemptAtRandom(seed, preempt),
        rng.sample(range(num_blocks), num_blocks),
        mode,
        num_host_blocks,
    )
    arrivals = sorted(requests, key=lambda r: r[2])
    for step in range(13):
        while arrivals and arrivals[0][2] == step:
            prompt, max_tokens, _ = arrivals.pop(0)
            driver.add(f"r{len(driver.max_tokens)}", prompt, max_tokens)
        driver.step()
    driver.run()
    for number, (prompt, max_tokens, _) in enumerate(sorted(requests, key=lambda r: r[2])):
        tokens = tuple((number * 7 + i) % 50 for i in range(prompt))
        assert driver.finished[f"r{number}"] == ("length", solo_tokens(tokens, number, max_tokens))


@given(
    requests=requests,
    block_size=st.integers(1, 4),
    num_blocks=st.integers(1, 12),
    num_host_blocks=st.integers(0, 8),
    mode=st.sampled_from(PREEMPTION_MODES),
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_in_a_pool_too_small_and_with_aborts_nothing_is_lost_and_nothing_hangs(
    requests, block_size, num_blocks, num_host_blocks, mode, aborts, seed
):
    """A request that outgrows the pool keeps a prefix of its tokens; an aborted one frees its blocks (checked by
    run).
    """
    driver = Driver(
        num_blocks,
        block_size,
        max_num_seqs=8,
        budget=16,
        policy=PreemptAtRandom(seed, 0.1),
        mode=mode,
        num_host_blocks=num_host_blocks,
    )
    fitting = [(p, m) for p, m, _ in requests if blocks_for(p, block_size) <= num_blocks]
    for number, (prompt, max_tokens) in enumerate(fitting):
        driver.add(f"r{number}", prompt, max_tokens)
    aborted = set()
    for step in range(31):
        for when, number in aborts:
            group = driver.scheduler.get(f"r{number}")
            if when == step and group is not None:
                driver.scheduler.finish_group(group, "abort")
                aborted.add(number)
        driver.step()
    driver.run()
    for number, (prompt, max_tokens) in enumerate(fitting):
        if number in aborted:
            continue
        tokens = tuple((number * 7 + i) % 50 for i in range(prompt))
        reason, output = driver.finished[f"r{number}"]
        assert output == solo_tokens(tokens, number, max_tokens)[: len(output)]
        room = num_blocks * block_size - prompt + 1
        assert len(output) == min(max_tokens, room)
        assert reason == "length"


@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    spare_blocks=st.integers(0, 3),
    budget=st.integers(6, 40),
    mode=st.sampled_from(PREEMPTION_MODES),
    num_host_blocks=st.sampled_from([0, 5, 100]),
    seed=st.integers(0, 99),
)
def test_the_victim_is_the_latest_and_progress_is_bounded(lengths, spare_blocks, budget, mode, num_host_blocks, seed):
    """The bound of scheduler.py: k groups of at most T tokens take at most T k (k + 1) / 2 steps."""
    rng = random.Random(seed)
    num_blocks = blocks_for(max(lengths) + 20, 2) + spare_blocks
    free_order = rng.sample(range(num_blocks), num_blocks)
    driver = Driver(num_blocks, 2, 6, budget, free_order=free_order, mode=mode, num_host_blocks=num_host_blocks)
    for number, length in enumerate(lengths):
        driver.add(f"r{number}", length, 20)
    steps = 0
    while driver.scheduler.has_unfinished:
        earliest = next(iter(driver.scheduler.running), None)
        schedule = driver.step()
        steps += 1
        kept = [share.group.number for share in schedule.shares]
        assert all(victim.number > max(kept) for victim in schedule.preempted)
        assert earliest is None or earliest.number in kept, "the earliest running group made no progress"
    assert steps <= (max(lengths) + 20) * len(lengths) * (len(lengths) + 1) // 2
