"""Block tables as in the paper's Figure 6, and the queues."""

from __future__ import annotations

from minipaged.show import Contents, draw_queues, draw_tables, make_snapshot
from minipaged.show.labels import label, listed, ranges
from minipaged.step import SequenceWork, StepPlan
from tests.unit.show.pictures import text_of


def test_a_table_tells_logical_physical_and_filled_and_what_is_in_the_slots():
    contents = Contents(4)
    contents.apply(StepPlan(0, (SequenceWork(0, (1, 2, 3, 4, 5, 6, 7), 0, (7, 1), 0),), ()))
    words = dict(enumerate(["", "Four", " score", " and", " seven", " years", " ago", "\nour"]))
    snapshot = make_snapshot(4, 8, {0: [(7, 4), (1, 3)]}, groups={"mine": (0,)})
    assert text_of(draw_tables(snapshot, contents, words)).splitlines() == [
        "sequence  logical  physical  filled  in its slots",
        "A mine          0         7     4/4  │Four│ score│ and│ seven│",
        "                1         1     3/4  │ years│ ago│⏎our│·│",
    ]
    assert "#5│#6│#7" in text_of(draw_tables(snapshot, contents))


def test_tables_of_swapped_sequences_are_shown_with_their_host_blocks():
    contents = Contents(4)
    contents.apply(StepPlan(0, (SequenceWork(1, (8, 9), 0, (4,), 0),), ()))
    contents.apply(StepPlan(1, (), (), swap_out=((4, 2),)))
    snapshot = make_snapshot(4, 8, {}, host_tables={1: [(2, 2)]}, num_host_blocks=4)
    assert "host 2     2/4  │#8│#9│·│·│" in text_of(draw_tables(snapshot, contents))


def test_long_tables_become_one_line_each_and_lose_no_block():
    tables = {0: [(block, 4) for block in range(100, 160)] + [(7, 1)], 1: [(2 * i, 4) for i in range(60)]}
    picture = text_of(draw_tables(make_snapshot(4, 200, tables)))
    assert "100–159 7" in picture and "1/4" in picture
    listed_blocks = [int(word) for word in picture.split("100–159 7")[1].replace("1/4", "").split() if word.isdigit()]
    assert [block for block in listed_blocks if block != 1][:60] == [2 * i for i in range(60)]
    assert max(map(len, picture.splitlines())) <= 80


def test_queues_name_requests_and_the_letters_of_their_sequences():
    groups = {"one": (0, 2), "two": (1,), "three": (3,), "four": (4,)}
    snapshot = make_snapshot(
        4, 8, {}, groups=groups, running=("one",), waiting=("two", "four"), swapped=("three",), preempted=("two",)
    )
    assert text_of(draw_queues(snapshot)).splitlines() == [
        "waiting    two (B)  four (E)",
        "running    one (A C)",
        "swapped    three (D)",
        "preempted  two (B)",
    ]
    assert text_of(draw_queues(make_snapshot(4, 8, {}))) == "running  nobody"


def test_labels_are_letters_and_go_on_after_z():
    assert [label(seq_id) for seq_id in (0, 25, 26, 52)] == ["A", "Z", "A1", "A2"]
    assert [listed("A"), listed("AB"), listed("ABC")] == ["A", "A and B", "A, B and C"]
    assert ranges((7, 1, 3, 4, 5, 6, 9, 10)) == "7 1 3–6 9 10"
