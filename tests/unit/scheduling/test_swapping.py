"""Swap or recompute: who is swapped, who comes back when, and what happens when the host pool is full. Block size 4."""

from __future__ import annotations

import pytest

from minipaged.scheduling.group import GroupState
from tests.unit.scheduling.driver import Driver
from tests.unit.scheduling.test_scheduler import tokens_of


def two_that_do_not_fit(**options):
    """a and b grow from seven tokens in a pool of four blocks: at the ninth, one must go."""
    driver = Driver(num_blocks=4, **options)
    driver.add("a", 7, 5)
    driver.add("b", 7, 5)
    assert tokens_of(driver.step()) == [("a", 7), ("b", 7)]
    assert tokens_of(driver.step()) == [("a", 1), ("b", 1)]
    return driver, driver.plan()


def test_by_swap_the_latest_goes_out_and_comes_back_with_what_it_had():
    driver, third = two_that_do_not_fit(mode="swap", num_host_blocks=2)
    assert tokens_of(third) == [("a", 1)]
    assert third.plan.swap_out == ((2, 0), (3, 1))
    assert third.plan.work[0].block_table == (0, 1, 3)  # one of the victim's blocks, in the same step
    assert [group.state for group in third.preempted] == [GroupState.SWAPPED]
    driver.apply(third)
    assert [tokens_of(driver.step()) for _ in range(2)] == [[("a", 1)], [("a", 1)]]
    back = driver.step()
    assert tokens_of(back) == [("b", 1)]  # no token is computed again
    assert [host for host, _ in back.plan.swap_in] == [0, 1]
    driver.run()


def test_by_recompute_it_starts_again():
    driver, third = two_that_do_not_fit(mode="recompute", num_host_blocks=2)
    assert third.plan.swap_out == ()
    driver.apply(third)
    assert [tokens_of(driver.step()) for _ in range(3)] == [[("a", 1)], [("a", 1)], [("b", 9)]]


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_a_full_host_pool_falls_back_to_recompute(mode):
    driver, third = two_that_do_not_fit(mode=mode, num_host_blocks=1)
    assert [group.state for group in third.preempted] == [GroupState.WAITING]
    driver.apply(third)
    driver.run()


def test_by_default_a_single_sequence_is_recomputed():
    _, third = two_that_do_not_fit(mode="auto", num_host_blocks=2)
    assert [group.state for group in third.preempted] == [GroupState.WAITING]


def test_swapped_groups_come_back_in_their_order_and_before_anybody_new_begins():
    driver = Driver(num_blocks=9, mode="swap", num_host_blocks=20)
    for name in "abc":
        driver.add(name, 11, 12)
    while len(driver.scheduler.swapped) < 2:
        driver.step()
    driver.add("new", 1, 1)
    began = []
    while driver.scheduler.has_unfinished:
        began += [s.group.request_id for s in driver.step().shares if s.group.request_id not in began]
    assert began == ["a", "b", "c", "new"]


def test_the_host_pool_is_never_overfilled():
    """Known fact A-7: swapped blocks can exceed the device's, whatever the paper says. The rest is recomputed."""
    driver = Driver(num_blocks=12, mode="swap", num_host_blocks=4)
    for name in "abc":
        driver.add(name, 14, 30)
    kinds = set()
    while driver.scheduler.has_unfinished:
        kinds |= {group.state for group in driver.step().preempted}
    assert kinds == {GroupState.SWAPPED, GroupState.WAITING}


def test_a_swapped_group_that_is_aborted_leaves_nothing_on_the_host():
    driver, third = two_that_do_not_fit(mode="swap", num_host_blocks=2)
    driver.apply(third)
    driver.scheduler.finish_group(driver.scheduler.get("b"), "abort")
    assert driver.host.num_free == 2
    driver.run()


def test_a_group_that_a_failed_step_put_out_is_recomputed():
    """Its copies may never have been made, and its device blocks belong to others by now."""
    driver, failed = two_that_do_not_fit(mode="swap", num_host_blocks=2)
    for share in failed.shares:
        driver.scheduler.finish_group(share.group, "error")
    driver.scheduler.withdraw()
    driver.scheduler.check()
    assert driver.scheduler.get("b").state is GroupState.WAITING
    assert driver.host.num_free == 2
    assert tokens_of(driver.step()) == [("b", 9)]
    driver.run()


def test_a_step_may_consist_of_swapping_out_alone():
    class PutAllOut:
        asked = 0

        def next_victim(self, running, must):
            self.asked += 1
            return running[-1] if self.asked <= 2 else None

    driver = Driver(num_blocks=8, policy=PutAllOut(), mode="swap", num_host_blocks=8)
    driver.add("a", 5, 3)
    driver.add("b", 5, 3)
    driver.step()
    alone = driver.step()
    assert alone.plan.swap_out and not alone.plan.work and not alone.plan.is_empty
    assert tokens_of(driver.step()) == [("a", 1), ("b", 1)]
    driver.run()


@pytest.mark.parametrize("num_blocks", range(1, 9))
@pytest.mark.parametrize("num_host_blocks", [0, 1, 8])
@pytest.mark.parametrize("mode", ["auto", "recompute", "swap"])
def test_one_token_blocks_in_tiny_pools_lose_nothing(num_blocks, num_host_blocks, mode):
    driver = Driver(num_blocks, block_size=1, mode=mode, num_host_blocks=num_host_blocks)
    for name in "abc":
        driver.add(name, max(1, num_blocks // 2), num_blocks - max(1, num_blocks // 2) + 1)
    driver.run()
    assert {reason for reason, _ in driver.finished.values()} == {"length"}
    assert {len(tokens) for _, tokens in driver.finished.values()} == {num_blocks - max(1, num_blocks // 2) + 1}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_prompts_of_exactly_the_pool_and_of_one_token_more(mode):
    driver = Driver(num_blocks=3, mode=mode, num_host_blocks=3)
    driver.add("exact", 12, 1)
    driver.add("grows", 11, 2)
    driver.add("outgrows", 12, 2)
    driver.run()
    assert [len(tokens) for _, tokens in driver.finished.values()] == [1, 2, 1]
