"""When memory is full: samples and beams that are swapped, policies that err, what is needed, and what is counted."""

from __future__ import annotations

import logging

import pytest

from minipaged.beam_search_params import BeamSearchParams
from minipaged.engine import metering
from minipaged.errors import InvalidPrompt, InvariantBroken
from minipaged.sampling_params import SamplingParams
from tests.shadow_worker import solo_tokens
from tests.unit.engine.test_llm_engine import add, make_engine, run
from tests.unit.engine.test_parallel_sampling import PROMPT, PreemptAt


def test_samples_are_swapped_as_a_whole_and_share_again_what_they_shared():
    snapshots, plans = [], []

    def on_step(plan, result, snapshot):
        plans.append(plan)
        snapshots.append(snapshot)

    engine = make_engine(policy=PreemptAt(2), on_step=on_step, num_host_blocks=8)
    add(engine, "a", n=3)
    outputs = run(engine)["a"].outputs
    assert [output.token_ids for output in outputs] == [list(solo_tokens(PROMPT, 3 + i, 6)) for i in range(3)]
    out, back = snapshots[2], snapshots[3]
    assert out.swapped == out.preempted == ("a",)
    assert not out.tables and len(out.host_tables) == 3
    # Five prompt tokens and one of each sample: the first block is shared, the second ones are their own.
    assert sorted(out.host_ref_counts, reverse=True) == [3, 1, 1, 1, 0, 0, 0, 0]
    assert len(plans[2].swap_out) == len(plans[3].swap_in) == 4
    assert sorted(back.ref_counts, reverse=True)[:5] == [3, 1, 1, 1, 0]
    assert [event.kind for event in out.events if event.kind == "swap_out"] == ["swap_out"] * 3
    assert sum(plan.num_tokens for plan in plans) == 5 + 3 * 5  # nothing was computed again


def test_a_sample_that_has_ended_is_not_swapped_with_the_others():
    """Known bug A-1: finished siblings that are counted leak their blocks."""
    stop = solo_tokens(PROMPT, 4, 6)[1]
    engine = make_engine(policy=PreemptAt(4), num_host_blocks=8, preemption_mode="swap")
    add(engine, "a", n=2, stop_token_ids=[stop])
    outputs = run(engine)["a"].outputs
    assert outputs[1].token_ids == list(solo_tokens(PROMPT, 4, 6)[:2])
    assert outputs[0].token_ids == list(solo_tokens(PROMPT, 3, 6))
    assert engine.get_metrics().counts.num_preemptions_by_swap == 1


def test_a_request_can_be_aborted_from_the_viewer_in_the_step_that_swaps_it():
    engine = make_engine(policy=PreemptAt(2), num_host_blocks=8)
    engine.on_step = lambda plan, result, snapshot: engine.abort_request(snapshot.swapped)
    add(engine, "a", n=3)
    output = run(engine)["a"]
    assert {answer.finish_reason for answer in output.outputs} == {"abort"}


@pytest.mark.parametrize(
    ("length", "params", "expected"),
    [
        (4, {"max_tokens": 1}, 1),  # the last token is never fed
        (4, {"max_tokens": 2}, 2),
        (5, {"max_tokens": 4}, 2),
        (5, {"max_tokens": 5}, 3),
        (5, {"max_tokens": 5, "n": 3}, 1 + 3 * 2),
        (8, {"max_tokens": 5, "n": 3, "best_of": 4}, 2 + 4 * 1),
        (5, {"max_tokens": 1, "n": 3}, 2),
        (5, {"max_tokens": None}, 15),  # max_model_len is 60, and its last token is never fed
        (5, {"max_tokens": 1000}, 15),
    ],
)
def test_max_blocks_needed_counts_samples_at_full_length_with_the_prompt_shared(length, params, expected):
    engine = make_engine(num_blocks=60)
    needed = engine.max_blocks_needed({"prompt_token_ids": list(range(length))}, SamplingParams(**params))
    assert needed == expected


def test_a_pool_of_max_blocks_needed_suffices_and_one_block_less_does_not():
    params = SamplingParams(n=3, max_tokens=8, seed=3, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(5))}
    needed = make_engine(num_blocks=60).max_blocks_needed(prompt, params)
    lengths = []
    for num_blocks in (needed, needed - 1):
        engine = make_engine(num_blocks)
        engine.add_request("a", prompt, params)
        lengths.append([len(answer.token_ids) for answer in run(engine)["a"].outputs])
    assert lengths[0] == [8, 8, 8]
    assert min(lengths[1]) < 8


def test_beams_need_what_as_many_samples_need():
    engine = make_engine(num_blocks=60)
    prompt = {"prompt_token_ids": list(range(5))}
    assert engine.max_blocks_needed(prompt, BeamSearchParams(3, 5)) == 7
    with pytest.raises(InvalidPrompt):
        engine.max_blocks_needed("no tokenizer here", BeamSearchParams(3, 5))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_policy_that_names_one_that_does_not_run_is_named_and_loses_nobody(mode):
    class NamesItTwice:
        asked, victim = 0, None

        def next_victim(self, running, must):
            self.asked += 1
            self.victim = self.victim or running[-1]
            return self.victim if self.asked in (1, 2) else None

    engine = make_engine(policy=NamesItTwice(), preemption_mode=mode, num_host_blocks=8)
    prompts = [add(engine, name) for name in "ab"]
    engine.step()
    with pytest.raises(InvariantBroken, match="names no victim that runs: SequenceGroup"):
        engine.step()
    done = run(engine)
    assert [done[name].outputs[0].token_ids for name in "ab"] == [list(solo_tokens(p, 3, 6)) for p in prompts]


def test_one_that_outgrew_the_pool_in_a_plan_that_broke_may_be_aborted_and_its_name_used_again():
    class PutsOneOutThenRaises:
        asked_again = None

        def next_victim(self, running, must):
            if self.asked_again is False:
                self.asked_again = True
                raise RuntimeError("policy")
            if must and self.asked_again is None:
                self.asked_again = False
            return running[0] if must else None

    engine = make_engine(num_blocks=6, policy=PutsOneOutThenRaises(), preemption_mode="recompute")
    add(engine, "a", n=2, max_tokens=40)
    for _ in range(6):
        engine.step()
    add(engine, "b", 1)
    with pytest.raises(RuntimeError, match="policy"):
        run(engine)
    engine.abort_request("a")
    again = add(engine, "a", first=20)
    ends = [(o.request_id, o.outputs[0].finish_reason) for o in engine.step() if o.finished]
    assert ends == [("a", "abort")]
    assert run(engine)["a"].outputs[0].token_ids == list(solo_tokens(again, 3, 6))


def test_without_chunking_siblings_that_wait_to_be_fed_whole_do_not_wait_behind_newcomers_for_ever():
    class PutOutTheFirstAt56Tokens:
        done = False

        def next_victim(self, running, must):
            if not self.done and running[0].live[0].num_tokens == 56:
                self.done = True
                return running[0]
            return running[-1] if must else None

    engine = make_engine(
        num_blocks=100,
        block_size=8,
        policy=PutOutTheFirstAt56Tokens(),
        enable_chunked_prefill=False,
        max_num_batched_tokens=60,
        max_num_seqs=10,
        preemption_mode="recompute",
    )
    add(engine, "old", 3, n=2, max_tokens=57)  # each half comes back as one prefill of 56 tokens
    num_added = 0
    for step in range(300):
        wanted = 0 if step < 41 else 5 if step < 55 else 9  # four decodes let one half in, and not the other
        while len(engine.scheduler.groups) < wanted:
            add(engine, str(num_added), 5, max_tokens=22 + 4 * num_added if step < 55 else 8 + num_added % 5)
            num_added += 1
        if "old" in [output.request_id for output in engine.step() if output.finished]:
            return
    raise AssertionError("the oldest request waits for ever")


def test_one_that_waits_for_others_to_end_is_not_looked_up_in_the_cache_in_each_step(monkeypatch):
    engine = make_engine(max_num_seqs=1, enable_prefix_caching=True)
    add(engine, "a", 9)
    engine.step()
    add(engine, "b", 9)
    with monkeypatch.context() as patch:
        patch.setattr(engine.prefixes, "find", None)
        engine.step()
    assert run(engine)["b"].num_cached_tokens == 8


class TestMetrics:
    def test_moments_of_a_request_come_in_their_order(self):
        engine = make_engine(enable_prefix_caching=True)
        add(engine, "a", 9)
        run(engine)
        add(engine, "b", 9)
        metrics = run(engine)["b"].metrics
        assert metrics.num_cached_tokens == 8
        assert min(metrics.queue_time, metrics.prefill_time, metrics.decode_time) >= 0
        total = metrics.finished_time - metrics.arrival_time
        assert metrics.queue_time + metrics.prefill_time + metrics.decode_time == pytest.approx(total)
        assert engine.get_metrics().counts.prefix_cache_hit_rate == 8 / 18

    def test_a_request_that_never_ran_has_no_times(self):
        engine = make_engine()
        add(engine, "a")
        engine.abort_request("a")
        [output] = engine.step()
        assert output.metrics.queue_time is output.metrics.prefill_time is output.metrics.decode_time is None

    def test_pools_and_queues_at_a_moment(self):
        engine = make_engine(max_num_seqs=3, num_host_blocks=8, policy=PreemptAt(2))
        add(engine, "a", n=3)
        add(engine, "b")
        engine.step()
        engine.step()
        metrics = engine.get_metrics()
        assert (metrics.num_running, metrics.num_waiting, metrics.num_swapped) == (1, 1, 0)
        assert (metrics.num_used_blocks, metrics.num_filled_slots) == (4, 4 + 3 * 2)
        assert (metrics.kv_use, metrics.kv_fill) == (4 / 16, 10 / 16)
        engine.step()
        metrics = engine.get_metrics()
        assert (metrics.num_running, metrics.num_waiting, metrics.num_swapped) == (0, 1, 1)
        assert (metrics.num_used_blocks, metrics.num_used_host_blocks) == (0, 4)
        assert metrics.kv_fill == 1.0
        run(engine)

    @pytest.mark.parametrize(("mode", "again"), [("swap", 0), ("recompute", 4 + 3 * 3)])  # the first block once
    def test_counts_of_a_preempted_request(self, mode, again):
        engine = make_engine(policy=PreemptAt(3), num_host_blocks=8, preemption_mode=mode)
        add(engine, "a", n=3)
        run(engine)
        counts = engine.get_metrics().counts
        assert counts.num_preemptions_by_swap == (mode == "swap")
        assert counts.num_preemptions_by_recompute == (mode == "recompute")
        assert counts.num_blocks_swapped_out == counts.num_blocks_swapped_in == (4 if mode == "swap" else 0)
        assert counts.num_generated_tokens == 18
        assert counts.num_blocks_copied == 2
        assert counts.num_finished_requests == 1
        assert counts.num_recomputed_tokens == counts.num_computed_tokens - (5 + 3 * 5) == again

    def test_what_was_applied_is_counted_although_the_viewer_raised(self):
        def on_step(plan, result, snapshot):
            if snapshot.preempted:
                raise RuntimeError("viewer")

        engine = make_engine(policy=PreemptAt(3), num_host_blocks=8, on_step=on_step)
        add(engine, "a", n=3)
        with pytest.raises(RuntimeError, match="viewer"):
            run(engine)
        run(engine)
        counts = engine.get_metrics().counts
        assert counts.num_blocks_swapped_out == counts.num_blocks_swapped_in == 4

    def test_every_token_of_a_beam_is_counted_the_last_one_too(self):
        engine = make_engine()
        engine.add_request("a", {"prompt_token_ids": [1, 2]}, BeamSearchParams(1, 5))
        run(engine)
        assert engine.get_metrics().counts.num_generated_tokens == 5

    def test_a_copy_of_the_counts_does_not_change_any_more(self):
        engine = make_engine()
        before = engine.get_metrics()
        add(engine, "a")
        run(engine)
        assert before.counts.num_steps == 0

    def test_long_work_says_how_it_goes(self, monkeypatch, caplog):
        monkeypatch.setattr(metering, "LOG_INTERVAL", 0.0)
        engine = make_engine()
        add(engine, "a")
        with caplog.at_level(logging.INFO, "minipaged"):
            engine.step()
        [record] = caplog.records
        assert record.getMessage().startswith("running 1, waiting 0, swapped 0 | ")
        assert "KV use 12%, fill 62%" in record.getMessage()

    def test_short_work_is_silent(self, caplog):
        engine = make_engine()
        add(engine, "a")
        with caplog.at_level(logging.INFO, "minipaged"):
            run(engine)
        assert not caplog.records
