"""Several samples of one prompt: computed once, forked, each with its own seed and its own end (paper, section 4.4)."""

from __future__ import annotations

import pytest

from minipaged.sampling_params import SamplingParams
from minipaged.step import Draw, TokenLogprob
from tests.shadow_worker import solo_tokens
from tests.unit.engine.test_llm_engine import add, make_engine, run

PROMPT = (1, 2, 3, 4, 5)


class PreemptAt:
    """Puts the latest out in some steps; it is asked from the second one on, when somebody runs."""

    def __init__(self, *steps):
        self.steps, self.asked = steps, 0

    def next_victim(self, running, must):
        self.asked += 1
        return running[-1] if self.asked in self.steps or must else None


def test_sample_i_is_what_a_request_with_seed_plus_i_draws():
    engine = make_engine(num_blocks=30)
    add(engine, "a", n=4)
    outputs = run(engine)["a"].outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert [output.token_ids for output in outputs] == [list(solo_tokens(PROMPT, 3 + i, 6)) for i in range(4)]


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_the_prompt_is_computed_once_and_its_partial_block_copied_for_all_but_one(length):
    plans, fullest = [], []

    def on_step(plan, result, snapshot):
        plans.append(plan)
        fullest.append(snapshot.num_used_blocks)

    engine = make_engine(num_blocks=30, on_step=on_step)
    add(engine, "a", length, n=4, max_tokens=3)
    run(engine)
    assert [plan.num_tokens for plan in plans] == [length, 4, 4]
    assert [len(plan.copies) for plan in plans] == [0, 3 if length % 4 else 0, 0]
    shared = length // 4
    assert fullest[0] == -(-length // 4)
    assert fullest[1] == shared + 4 * (-(-(length + 1) // 4) - shared)


def test_a_sample_that_ends_early_gives_its_blocks_back_and_is_never_counted_again():
    """Known bug A-1: a recompute that counts finished siblings leaks their blocks and copies for nobody."""
    stop = solo_tokens(PROMPT, 4, 6)[1]
    assert stop not in solo_tokens(PROMPT, 3, 6)
    plans = []
    engine = make_engine(policy=PreemptAt(5), on_step=lambda plan, *_: plans.append(plan))
    add(engine, "a", n=2, stop_token_ids=[stop])
    output = run(engine)["a"]
    assert [answer.token_ids for answer in output.outputs] == [
        list(solo_tokens(PROMPT, 3, 6)),
        list(solo_tokens(PROMPT, 4, 2)),
    ]
    assert output.metrics.num_preemptions == 1
    recompute = next(plan for plan in plans[3:] if plan.num_tokens > 1)
    assert [len(row.token_ids) for row in recompute.work] == [len(PROMPT) + 5]
    assert sum(len(plan.copies) for plan in plans) == 1
    assert all(len(entry.draws) == 1 for plan in plans[1:] for entry in plan.sampling)


def test_samples_that_were_put_out_compute_their_common_blocks_once_again_and_share_them():
    plans, tables = [], []

    def on_step(plan, result, snapshot):
        plans.append(plan)
        tables.append(snapshot.tables)

    engine = make_engine(num_blocks=40, policy=PreemptAt(4), on_step=on_step)
    prompt = add(engine, "a", 10, n=3)
    outputs = run(engine)["a"].outputs
    assert [output.token_ids for output in outputs] == [list(solo_tokens(prompt, 3 + i, 6)) for i in range(3)]
    first, second = [i for i, plan in enumerate(plans) if i > 0 and plan.num_tokens > 3]
    assert plans[first].num_tokens == 14  # one sample whole: the prompt and its four tokens
    assert plans[second].num_tokens == 1 + 6 + 6  # its next one, and what the others do not share
    assert len({table[:2] for table in tables[second].values()}) == 1


def test_the_best_of_more_samples_are_returned_best_first():
    engine = make_engine(num_blocks=40)
    execute = engine.worker.execute

    def scored(draw):
        """Each draw's log-probability is its token id, negative: the smallest sum wins."""
        return Draw(draw.token_id, TokenLogprob(draw.token_id, -draw.token_id, 1), ())

    def with_logprobs(plan):
        result = execute(plan)
        return type(result)(tuple(tuple(map(scored, row)) for row in result.entries))

    engine.worker.execute = with_logprobs
    add(engine, "a", n=2, best_of=5)
    samples = sorted((solo_tokens(PROMPT, 3 + i, 6) for i in range(5)), key=sum)
    outputs = run(engine)["a"].outputs
    assert [output.token_ids for output in outputs] == [list(tokens) for tokens in samples[:2]]
    assert [output.index for output in outputs] == [0, 1]


def test_samples_count_towards_max_num_seqs_before_they_are_forked():
    engine = make_engine(num_blocks=60, max_num_seqs=4)
    for name in ("a", "b"):
        add(engine, name, n=3)
    engine.step()
    assert [group.request_id for group in engine.scheduler.running] == ["a"]
    run(engine)


def test_an_abort_frees_every_sample():
    engine = make_engine(num_blocks=40)
    add(engine, "a", n=3)
    engine.step()
    engine.step()
    engine.abort_request("a")
    assert engine.blocks.num_free == 40
    assert [answer.finish_reason for answer in run(engine)["a"].outputs] == ["abort"] * 3


def test_more_samples_than_the_pool_can_ever_hold_are_refused_with_the_numbers():
    message = r"n = 4: so many sequences behind a prompt of 6 tokens need 5 KV blocks.* the pool has 4"
    with pytest.raises(ValueError, match=message):
        make_engine(num_blocks=4).add_request("a", {"prompt_token_ids": [1] * 6}, SamplingParams(n=4))
    engine = make_engine(num_blocks=5)
    engine.add_request("a", {"prompt_token_ids": [1] * 6}, SamplingParams(n=4, max_tokens=2))
    run(engine)


def test_at_the_end_of_the_context_no_sample_ever_needs_a_block_of_its_own():
    engine = make_engine(num_blocks=2, max_model_len=9)
    add(engine, "a", 8, n=4, max_tokens=None)
    assert [len(answer.token_ids) for answer in run(engine)["a"].outputs] == [1] * 4


def test_more_samples_than_python_recurses_share_their_beginning_again_after_a_preemption():
    engine = make_engine(num_blocks=3000, policy=PreemptAt(2), max_num_seqs=1100)
    prompt = add(engine, "a", 9, n=1100, max_tokens=3)
    output = run(engine)["a"]
    assert output.metrics.num_preemptions == 1
    assert output.outputs[-1].token_ids == list(solo_tokens(prompt, 3 + 1099, 3))
