"""Who runs, who waits, who goes: single scenes, each with numbers that can be checked by hand. Block size 4."""

import pytest

from minipaged.errors import IllegalTransition
from minipaged.scheduling.group import TRANSITIONS, GroupState
from minipaged.scheduling.viewing import take_snapshot
from tests.shadow_worker import solo_tokens
from tests.unit.scheduling.driver import Driver


def tokens_of(schedule):
    """(request, tokens fed) for each row of the plan."""
    return [(share.group.request_id, share.num_tokens) for share in schedule.shares]


def test_prompts_that_fit_start_together_and_then_decode_one_token_each():
    driver = Driver(num_blocks=8)
    for name in "abcd":
        driver.add(name, prompt_length=4, max_tokens=4)
    assert tokens_of(driver.step()) == [("a", 4), ("b", 4), ("c", 4), ("d", 4)]
    assert tokens_of(driver.step()) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]


def test_with_chunk_borders_a_chunk_ends_where_a_block_does_unless_it_ends_the_prompt():
    """The value of vLLM's test: budget 64 and two prompts of 50 give chunks of 50 and 12, not 14."""
    driver = Driver(num_blocks=40, budget=64, chunk_border=4)
    driver.add("a", 50, 9)
    driver.add("b", 50, 9)
    assert tokens_of(driver.step()) == [("a", 50), ("b", 12)]
    assert tokens_of(driver.step()) == [("a", 1), ("b", 38)]


def test_a_budget_smaller_than_a_block_is_used_up_all_the_same():
    driver = Driver(num_blocks=40, budget=3, chunk_border=4, max_num_seqs=3)
    driver.add("a", 9, 1)
    assert [tokens_of(driver.step()) for _ in range(4)] == [[("a", 3)], [("a", 1)], [("a", 3)], [("a", 2)]]


def test_a_new_prompt_joins_running_decodes_in_one_ragged_batch():
    driver = Driver(num_blocks=20)
    driver.add("a", 1, 9)
    driver.step()
    driver.add("b", 30, 9)
    assert tokens_of(driver.step()) == [("a", 1), ("b", 30)]


def test_a_prompt_longer_than_the_budget_is_fed_in_chunks_and_samples_once_at_its_end():
    driver = Driver(num_blocks=40, budget=64)
    driver.add("a", 60, 9)
    driver.add("b", 60, 9)
    first = driver.step()
    assert tokens_of(first) == [("a", 60), ("b", 4)]
    assert [entry.row for entry in first.plan.sampling] == [0]
    second = driver.step()
    assert tokens_of(second) == [("a", 1), ("b", 56)]
    assert [entry.row for entry in second.plan.sampling] == [0, 1]


def test_chunks_in_progress_come_before_new_prompts_and_after_decodes():
    driver = Driver(num_blocks=80, budget=64)
    for name in "abcd":
        driver.add(name, 60, 9)
    driver.step()
    assert tokens_of(driver.step()) == [("a", 1), ("b", 56), ("c", 7)]


def test_without_chunking_a_prompt_waits_until_it_fits_into_a_step():
    driver = Driver(num_blocks=40, budget=64, chunked=False)
    driver.add("a", 60, 2)
    driver.add("b", 60, 2)
    assert tokens_of(driver.step()) == [("a", 60)]
    assert tokens_of(driver.step()) == [("a", 1), ("b", 60)]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_as_long_as_the_budget_is_served_in_the_end_even_while_others_decode(chunked):
    driver = Driver(num_blocks=64, budget=32, max_num_seqs=8, chunked=chunked)
    driver.add("a", 5, 20)
    driver.step()
    driver.add("b", 32, 3)
    driver.run()
    assert driver.finished["b"][0] == "length"


def test_no_more_sequences_run_than_max_num_seqs():
    driver = Driver(num_blocks=64, max_num_seqs=2)
    for name in "abc":
        driver.add(name, 4, 3)
    assert tokens_of(driver.step()) == [("a", 4), ("b", 4)]
    driver.run()


def test_the_latest_is_preempted_and_comes_back_as_one_prefill_with_its_tokens():
    """Two blocks, two prompts of three tokens: both fill their block, and then there is none for the next token."""
    driver = Driver(num_blocks=2)
    driver.add("a", 3, 4)
    b = driver.add("b", 3, 4)
    assert tokens_of(driver.step()) == [("a", 3), ("b", 3)]
    assert tokens_of(driver.step()) == [("a", 1), ("b", 1)]
    schedule = driver.step()
    assert tokens_of(schedule) == [("a", 1)]
    assert [group.request_id for group in schedule.preempted] == ["b"]
    assert (b.state, b.sequences[0].num_computed, b.sequences[0].num_tokens) == (GroupState.WAITING, 0, 5)
    driver.scheduler.finish_group(driver.scheduler.get("a"), "abort")
    assert tokens_of(driver.step()) == [("b", 5)]


def test_preempted_requests_come_back_in_order_of_arrival_and_before_those_that_never_ran():
    driver = Driver(num_blocks=3)
    for name in "abc":
        driver.add(name, 3, 6)
    driver.step()
    driver.add("d", 1, 6)
    driver.step()
    assert [group.request_id for group in driver.step().preempted] == ["c", "b"]
    assert [group.request_id for group in driver.scheduler.waiting] == ["b", "c", "d"]
    driver.run()
    assert list(driver.finished) == ["a", "b", "c", "d"]


def test_admission_leaves_a_block_for_each_running_sequence_about_to_cross_a_border():
    """Three blocks; `a` holds one and fills it in this step, so its next token needs a second one."""
    driver = Driver(num_blocks=3)
    driver.add("a", 4, 9)
    driver.step()
    driver.add("b", 8, 9)
    assert tokens_of(driver.step()) == [("a", 1)]  # a takes its second block; two would be needed for b, one is free
    driver = Driver(num_blocks=3)
    driver.add("a", 3, 9)
    driver.step()
    driver.add("b", 8, 9)
    assert tokens_of(driver.step()) == [("a", 1)]  # two are free, but a's next token will need one of them


def test_a_prompt_in_chunks_keeps_a_claim_on_the_blocks_that_it_has_not_taken_yet():
    driver = Driver(num_blocks=5, budget=8)
    driver.add("a", 16, 2)
    driver.add("b", 4, 2)
    assert tokens_of(driver.step()) == [("a", 8)]
    assert tokens_of(driver.step()) == [("a", 8)]


def test_a_small_pool_does_not_put_a_single_request_out_again_and_again():
    """vLLM 0.4 wanted a spare block for each token here and prefilled again for each one (N = 6, B = 4, prompt 21)."""
    driver = Driver(num_blocks=6)
    driver.add("a", 21, 3)
    steps = [driver.step() for _ in range(3)]
    assert [tokens_of(step) for step in steps] == [[("a", 21)], [("a", 1)], [("a", 1)]]
    assert not any(step.preempted for step in steps)


def test_a_prompt_of_exactly_the_whole_pool_runs_and_one_more_token_than_fits_ends_it():
    driver = Driver(num_blocks=2)
    driver.add("fits", 8, 1)
    driver.run()
    driver.add("outgrows", 8, 5)
    driver.run()
    assert driver.finished["outgrows"] == ("length", solo_tokens(tuple((7 + i) % 50 for i in range(8)), 1, 1))


def test_a_request_that_outgrows_the_pool_is_ended_only_when_it_is_alone():
    driver = Driver(num_blocks=4)
    driver.add("a", 4, 30)
    driver.add("b", 4, 4)
    driver.run()
    assert driver.finished["a"] == ("length", solo_tokens(tuple(range(4)), 0, 13))
    assert driver.finished["b"] == ("length", solo_tokens(tuple(range(7, 11)), 1, 4))


def test_planning_again_without_applying_feeds_the_same_tokens():
    """What happens when a step is lost between plan and apply: nothing is computed, nothing is counted twice."""
    driver = Driver(num_blocks=8)
    driver.add("a", 6, 4)
    driver.add("b", 3, 4)
    lost = driver.plan()
    again = driver.plan()
    assert [(row.token_ids, row.start) for row in again.plan.work] == [
        (row.token_ids, row.start) for row in lost.plan.work
    ]
    driver.apply(again)
    driver.run()
    assert driver.finished["a"] == ("length", solo_tokens(tuple(range(6)), 0, 4))


@pytest.mark.parametrize("when", ["waiting", "mid-chunk", "running", "between plan and apply"])
def test_an_abort_at_any_moment_frees_everything_and_harms_nobody(when):
    driver = Driver(num_blocks=16, budget=8, max_num_seqs=4)
    driver.add("other", 5, 6)
    victim = driver.add("victim", 12, 6)
    if when == "waiting":
        driver.scheduler.finish_group(victim, "abort")
    elif when == "mid-chunk":
        driver.step()
        assert 0 < victim.sequences[0].num_computed < 12
        driver.scheduler.finish_group(victim, "abort")
    elif when == "running":
        for _ in range(4):
            driver.step()
        driver.scheduler.finish_group(victim, "abort")
    else:
        schedule = driver.plan()
        driver.scheduler.finish_group(victim, "abort")
        driver.apply(schedule)
    driver.run()
    assert driver.finished == {"other": ("length", solo_tokens(tuple(range(5)), 0, 6))}


def test_the_states_are_those_of_the_picture():
    driver = Driver(num_blocks=4)
    group = driver.add("a", 2, 2)
    driver.run()
    assert group.state is GroupState.FINISHED
    assert TRANSITIONS[GroupState.FINISHED] == frozenset()
    with pytest.raises(IllegalTransition, match="request a: no way from finished to running"):
        group.move_to(GroupState.RUNNING)


def test_a_snapshot_shows_tables_counts_and_queues_of_the_moment():
    driver = Driver(num_blocks=4, free_order=[3, 1, 0, 2])
    driver.add("a", 6, 3)
    driver.add("b", 9, 3)
    snapshot = take_snapshot(driver.scheduler, driver.plan())
    assert snapshot.tables == {0: ((3, 4), (1, 2))}
    assert snapshot.ref_counts == (0, 1, 0, 1)
    assert snapshot.num_used_blocks == 2
    assert (snapshot.running, snapshot.waiting, snapshot.preempted) == (("a",), ("b",), ())
    assert snapshot.groups == {"a": (0,), "b": (1,)}
    assert snapshot.events == (("allocate", 0, (3, 1)),)
