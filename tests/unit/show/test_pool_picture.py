"""The pool as a grid: every state of a block has a symbol of its own, and everything fits into 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from minipaged.show import draw_pool, draw_strip, make_snapshot
from minipaged.step import SequenceWork, StepPlan
from tests.unit.show.pictures import text_of


def cells(picture: str) -> dict[int, tuple[str, str]]:
    """What is written in each cell of the device pool: block number -> (head without the number, bar)."""
    found = {}
    lines = [line for line in picture.splitlines() if line.startswith("│")]
    for head, bar in zip(lines[::2], lines[1::2], strict=True):
        for top, bottom in zip(head.strip("│").split("│"), bar.strip("│").split("│"), strict=True):
            number = "".join(letter for letter in top[:2] if letter.isdigit())
            if number:
                found[int(number)] = (top[len(number) :].strip(), bottom.strip())
    return found


def test_a_pool_in_all_its_states_as_a_golden_picture():
    snapshot = make_snapshot(4, 8, {0: [(7, 4), (3, 3)], 1: [(7, 4), (1, 4)]}, cached=frozenset({2}))
    plan = StepPlan(0, (SequenceWork(0, (5,), 6, (7, 3), 0),), (), copies=((1, 3),))
    assert text_of(draw_pool(snapshot, plan)) == (
        "device pool: 3 of 8 blocks in use, 1 cached; 11 of their 12 slots filled\n"
        "┌────────┬────────┬────────┬────────┬────────┬────────┬────────┬────────┐\n"
        "│0       │1 B     │2 ~     │3*A     │4       │5       │6       │7 AB×2  │\n"
        "│····    │▮▮▮▮    │▒▒▒▒    │▮▮▮▯    │····    │····    │····    │▮▮▮▮    │\n"
        "└────────┴────────┴────────┴────────┴────────┴────────┴────────┴────────┘\n"
        "▮ filled slot  ▯ empty slot  · free  ×2 references  ~ cached  * written now"
    )


def test_a_block_of_many_holders_names_some_and_counts_all():
    snapshot = make_snapshot(4, 12, {seq_id: [(11, 4)] for seq_id in range(11)})
    assert cells(text_of(draw_pool(snapshot)))[11] == ("A…×11", "▮▮▮▮")


def test_a_block_that_is_referenced_and_in_no_table_is_pinned():
    snapshot = make_snapshot(4, 3, {}, ref_counts=(0, 1, 0))
    picture = text_of(draw_pool(snapshot))
    assert cells(picture)[1] == ("#", "▮▮▮▮")
    assert "# pinned" in picture


@pytest.mark.parametrize(("filled", "bar"), [(1, "▮▯▯▯▯▯▯▯"), (8, "▮▮▮▮▯▯▯▯"), (15, "▮▮▮▮▮▮▮▯"), (16, "▮▮▮▮▮▮▮▮")])
def test_the_bar_of_a_large_block_is_to_scale_and_full_only_where_the_block_is(filled, bar):
    assert cells(text_of(draw_pool(make_snapshot(16, 4, {0: [(2, filled)]}))))[2] == ("A", bar)


def test_the_host_pool_stands_beside_the_device_pool():
    snapshot = make_snapshot(4, 10, {0: [(9, 4)]}, host_tables={1: [(0, 4), (2, 1)]}, num_host_blocks=6)
    picture = text_of(draw_pool(snapshot, StepPlan(0, (), (), swap_out=((3, 0), (4, 2)))))
    assert "device pool: 1 of 10" in picture and "host: 2 of 6" in picture
    [line] = [line for line in picture.splitlines() if line.count("│0") == 2]
    assert line.split() == ["│0", "│1", "│2", "│3", "│4", "│", "│0*B", "│1", "│2*B", "│"]
    assert max(map(len, picture.splitlines())) <= 80


def test_of_a_host_pool_too_large_for_cells_the_free_lines_are_counted_not_drawn():
    snapshot = make_snapshot(4, 10, {}, host_tables={1: [(0, 4), (57, 1)]}, num_host_blocks=58)
    picture = text_of(draw_pool(snapshot))
    assert "│57 B" in picture and "and 54 more, all free" in picture  # the first line and that of block 57 are drawn


def test_a_large_pool_has_a_character_for_each_block_and_draws_free_lines_together():
    tables = {0: [(0, 4), (1, 2)], 1: [(65, 4)], 2: [(65, 4)]}
    snapshot = make_snapshot(4, 1000, tables, cached=frozenset({70}))
    lines = text_of(draw_pool(snapshot)).splitlines()
    assert lines[1] == "     0 Aa" + "·" * 62
    assert lines[2] == "    64 ·2····~" + "·" * 57
    assert lines[3] == "   128 … 999: all free"
    assert max(map(len, lines)) <= 80
    assert draw_strip(snapshot).plain.splitlines() == lines[1:4]


def test_twelve_blocks_are_two_lines_of_six():
    assert text_of(draw_pool(make_snapshot(4, 12, {}))).count("│6") == 1
    assert text_of(draw_pool(make_snapshot(4, 12, {}))).splitlines()[2].count("│") == 7


def test_without_colour_no_colour_is_written_and_nothing_is_lost(monkeypatch):
    snapshot = make_snapshot(4, 8, {0: [(7, 4), (3, 3)], 1: [(7, 4), (1, 4)]})
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    console.print(draw_pool(snapshot))
    assert "\x1b[3" not in console.file.getvalue()
    monkeypatch.delenv("NO_COLOR")
    coloured = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    coloured.print(draw_pool(snapshot))
    assert "\x1b[36m" in coloured.file.getvalue()
