"""Beam search in the engine: what each step does to blocks, what a user may ask, what an end from outside leaves."""

from __future__ import annotations

import pytest

from minipaged.beam_search_params import BeamSearchParams
from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from minipaged.step import StepResult, TokenLogprob
from tests.beam_oracle import beam_search
from tests.shadow_worker import beam_logprobs
from tests.unit.engine.test_llm_engine import add, make_engine, run

PROMPT = [1, 2, 3, 4, 5]


def add_beams(engine, name="beams", width=3, max_tokens=6, **params):
    engine.add_request(name, {"prompt_token_ids": PROMPT}, BeamSearchParams(width, max_tokens, **params))


def test_the_results_are_the_oracle_s_best_first():
    engine = make_engine(num_blocks=30, eos=(4, 11))
    add_beams(engine)
    expected = beam_search(lambda tokens: beam_logprobs((*PROMPT, *tokens), 50), 3, 6, (4, 11)).found
    outputs = run(engine)["beams"].outputs
    assert [(out.token_ids, out.finish_reason) for out in outputs] == [(one.tokens, one.reason) for one in expected]
    assert [out.index for out in outputs] == [0, 1, 2]


def test_beams_samples_and_greedy_requests_run_together():
    engine = make_engine(num_blocks=60)
    add_beams(engine)
    add(engine, "samples", n=3)
    add(engine, "greedy", temperature=0)
    assert {name: len(output.outputs) for name, output in run(engine).items()} == {
        "beams": 3,
        "samples": 3,
        "greedy": 1,
    }


def scripted(engine, script):
    """Let the worker propose what the script says: for each step, for each beam in order, (token, log-probability)."""
    execute = engine.worker.execute

    def proposing(plan):
        execute(plan)
        rows = (
            tuple(TokenLogprob(token, logprob, i + 1) for i, (token, logprob) in enumerate(row))
            for row in script[plan.step]
        )
        return StepResult(tuple(rows))

    engine.worker.execute = proposing


def test_figure_9_of_the_paper_all_children_come_from_two_of_four_beams():
    """k = 4, block size 1: every token has a block of its own, so each fork and each free is one block.

    After the step in which only beams 1 and 2 have children, the blocks that 0 and 3 alone held are free again.
    """
    snapshots = []
    engine = make_engine(num_blocks=40, block_size=1, on_step=lambda plan, result, snapshot: snapshots.append(snapshot))
    spread = [(10, -1.0), (11, -1.1), (12, -1.2), (13, -1.3), *((20 + i, -9.0) for i in range(4))]
    bad = [(i, -50.0 - i) for i in range(30, 38)]
    good = [(40, -1.0), (41, -1.1), *((42 + i, -60.0) for i in range(6))]
    scripted(engine, [[spread], [bad, good, good, bad], [good] * 4])
    add_beams(engine, width=4, max_tokens=3)
    engine.step()
    assert snapshots[0].num_used_blocks == 5  # the prompt, once
    engine.step()
    before = snapshots[1]
    assert before.num_used_blocks == 5 + 4  # four beams with one token of their own each
    assert [before.ref_counts[block] for block, _ in before.tables[0][:5]] == [4] * 5
    dropped = {before.tables[seq][5].physical_block for seq in (0, 3)}
    engine.step()
    after = snapshots[2]
    assert len(after.tables) == 4
    assert after.num_used_blocks == 5 + 2 + 4  # prompt, the two parents' tokens (shared by two each), four new ones
    parents = sorted({table[5].physical_block for table in after.tables.values()})
    assert [after.ref_counts[block] for block in parents] == [2, 2]
    assert not dropped & set(parents)
    run(engine)


def test_a_beam_that_writes_into_a_block_which_another_reads_copies_it_first():
    """Block size 4, a prompt of 5: the second block is partial and shared by all, so 3 of 4 beams copy it."""
    plans = []
    engine = make_engine(num_blocks=40, on_step=lambda plan, *_: plans.append(plan))
    add_beams(engine, width=4, max_tokens=2)
    run(engine)
    assert [len(plan.copies) for plan in plans] == [0, 3]


def test_an_abort_frees_all_beams_and_keeps_what_there_was():
    engine = make_engine(num_blocks=30)
    add_beams(engine)
    engine.step()
    engine.step()
    engine.abort_request("beams")
    assert engine.blocks.num_free == 30
    outputs = run(engine)["beams"].outputs
    assert [(out.finish_reason, len(out.token_ids)) for out in outputs] == [("abort", 2)] * 3


def test_an_abort_before_the_first_step_gives_one_empty_answer():
    engine = make_engine()
    add_beams(engine)
    engine.abort_request("beams")
    assert [(out.finish_reason, out.token_ids) for out in run(engine)["beams"].outputs] == [("abort", [])]


def test_beams_that_outgrow_the_pool_end_with_length():
    engine = make_engine(num_blocks=6)
    add_beams(engine, max_tokens=40)
    outputs = run(engine)["beams"].outputs
    assert len(outputs) == 3
    assert {out.finish_reason for out in outputs} == {"length"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (BeamSearchParams(5, 4), r"beam_width = 5: must be at most max_num_seqs \(4\)"),
        (BeamSearchParams(4, 4), "beam_width = 4: so many sequences behind a prompt of 5 tokens need 5 KV blocks"),
    ],
)
def test_more_beams_than_can_ever_run_are_refused(params, message):
    engine = make_engine(num_blocks=4, max_num_seqs=4)
    with pytest.raises(InvalidParameter, match=message):
        engine.add_request("beams", {"prompt_token_ids": PROMPT}, params)


def test_the_parameters_of_sampling_are_no_parameters_of_beams():
    with pytest.raises(InvalidParameter, match="top_p = 0.5"):
        BeamSearchParams(beam_width=2, max_tokens=4, top_p=0.5)
    with pytest.raises(InvalidParameter, match="temperature = 0.7"):
        BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.7)
    with pytest.raises(InvalidParameter, match="n = 2"):
        SamplingParams(n=2, temperature=0)
