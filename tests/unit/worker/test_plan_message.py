"""The control message: what its reader gets is the plan, and what it already knows is not sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.step import BestCandidates, Sample, SamplingRules, ScorePrompt, SequenceWork, StepPlan
from minipaged.worker.plan_message import PlanReader, PlanWriter
from minipaged.worker.results import logit_rows

INTEGER = 4
HEADER = 6 * INTEGER
ROW = 6 * INTEGER
blocks = st.integers(0, 2**31 - 1)
pairs = st.lists(st.tuples(blocks, blocks), max_size=4).map(tuple)


@st.composite
def plans(draw):
    """Plans that follow each other: tables grow, change at the end or wholly, and come and go."""
    tables: dict[int, tuple[int, ...]] = {}
    versions: dict[int, int] = {}
    version, made = 0, []
    for step in range(draw(st.integers(1, 6))):
        work = []
        for seq_id in draw(st.lists(st.integers(0, 5), unique=True, max_size=4)):
            old = tables.get(seq_id, ())
            kept = draw(st.integers(0, len(old)))
            new = old[:kept] + tuple(draw(st.lists(blocks, min_size=not kept, max_size=3)))
            if new != old or draw(st.booleans()):  # a new version may have the old content
                version += 1
                versions[seq_id] = version
            tables[seq_id] = new
            tokens = tuple(draw(st.lists(blocks, min_size=1, max_size=5)))
            work.append(SequenceWork(seq_id, tokens, draw(blocks), new, versions[seq_id]))
        made.append(StepPlan(step, tuple(work), (), draw(pairs), draw(pairs), draw(pairs)))
    return made


@given(plans(), st.lists(st.lists(st.integers(0, 100), max_size=3), max_size=3))
def test_what_is_read_is_what_was_written(made, rows):
    writer, reader = PlanWriter(), PlanReader()
    for plan in made:
        assert reader.read(writer.write(plan, rows)) == (plan, rows)


def row(seq_id, table, version, tokens=(7,)):
    return SequenceWork(seq_id, tokens, 0, tuple(table), version)


def test_a_table_that_stays_is_not_sent_again_and_one_that_grows_costs_its_new_block():
    writer = PlanWriter()
    sizes = [
        len(writer.write(StepPlan(step, (row(0, table, version),), ()), []))
        for step, (table, version) in enumerate(
            [(range(100), 1), (range(100), 1), (range(101), 2), ([*range(100), 500], 3)]
        )
    ]
    known = HEADER + ROW + INTEGER  # and one token
    assert sizes == [known + 100 * INTEGER, known, known + INTEGER, known + INTEGER]


def test_what_a_step_leaves_out_is_forgotten_and_sent_again():
    writer, reader = PlanWriter(), PlanReader()
    first = StepPlan(0, (row(0, [1, 2], 1), row(1, [3], 2)), ())
    second = StepPlan(1, (row(1, [3], 2),), ())
    third = StepPlan(2, (row(0, [1, 2], 1), row(1, [3], 2)), ())
    messages = [writer.write(plan, []) for plan in (first, second, third)]
    assert len(messages[2]) == HEADER + 2 * (ROW + INTEGER) + 2 * INTEGER
    assert [reader.read(message)[0] for message in messages] == [first, second, third]


def test_the_rows_with_logits_are_the_last_tokens_and_then_the_scored_ones_in_pieces():
    work = (row(0, range(400), 1, (1,) * 600), row(1, [500], 2, (1, 2, 3)), row(2, [501], 3, (1, 2)))
    sampling = (ScorePrompt(0, (1,) * 500, 0, first=50), Sample(1, ((0, 0),), SamplingRules()), BestCandidates(2, 3))
    rows = logit_rows(StepPlan(0, work, sampling))
    assert rows == [[602, 604], list(range(50, 306)), list(range(306, 550))]


def test_a_number_that_does_not_fit_is_an_error_and_never_another_number():
    with pytest.raises(OverflowError):
        PlanWriter().write(StepPlan(0, (row(2**31, [1], 1),), ()), [])
