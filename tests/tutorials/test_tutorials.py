"""The tutorials themselves: each has its shape, and runs green from its first cell to its last."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from minipaged.tutorial.cells import find_tutorials
from minipaged.tutorial.player import Player

TUTORIALS = find_tutorials()
SHAPE = ["## Predict", "## Run", "## Break it", "## Exercise", "## Solution", "## Where this is in the code"]
WRONG_ANSWERS = {
    1: "check(30 * 15, 16)",
    2: "check(lambda slot, block_table, block_size: slot)",
    3: "check(lambda num_filled, num_tokens, block_size: -(-(num_tokens - num_filled) // block_size))",
    4: "check([28, 29, 30, 31, 4])",
    5: "check([7, 1, 3], [5, 1, 0])",
    6: "check(lambda block_size: block_size / 2)",
    7: "check([3, 3, 3, 1, 1, 0, 0, 0])",
    8: "check(lambda k, p, block_size: k - 1)",
    9: "check(lambda p, n, t, block_size: n * -(-(p + t - 1) // block_size))",
    10: "check(lambda parents, num_before: (len(parents), num_before))",
    11: "check(8, lambda lengths, places: sum(lengths) / places)",
    12: "check(PreemptLatest())",
    13: "check(12)",
    14: "check(lambda bytes_per_token, speed: bytes_per_token * speed)",
    15: "check(EvictLeastRecentlyUsed)",
    16: "check(lambda length, budget, num_talking: -(-length // budget))",
    17: "check([1, 2, 4, 8], 1)",
    18: "check(lambda bandwidth, batch_size, context: bandwidth / weight_bytes)",
    19: "check(lambda length, n, max_tokens, block_size: length + n * (max_tokens - 1))",
}
each_tutorial = pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.path.stem)


def test_they_are_numbered_from_one_without_a_gap():
    assert [tutorial.number for tutorial in TUTORIALS] == list(range(1, len(TUTORIALS) + 1))


@each_tutorial
def test_it_asks_runs_breaks_and_sets_an_exercise_in_this_order(tutorial):
    headings = [cell.text.splitlines()[0] for cell in tutorial.cells if cell.begins_section]
    places = [headings.index(heading) for heading in SHAPE]
    assert places == sorted(places)


@each_tutorial
def test_its_claims_are_asserted_and_its_exercise_is_blank_with_a_checked_solution(tutorial):
    sections, heading = {}, ""
    for cell in tutorial.cells:
        if cell.begins_section:
            heading = cell.text.splitlines()[0]
        elif not cell.is_prose:
            sections[heading] = sections.get(heading, "") + cell.text + "\n"
    assert "assert " in sections["## Run"]
    assert "assert" in sections["## Break it"].lower()
    assert re.search(r"^ *(return|my_\w+ =|my_\w+, my_\w+ =) \.\.\.", sections["## Exercise"], re.MULTILINE)
    assert "def check(" in sections["## Exercise"] and "assert " in sections["## Exercise"]
    assert re.search(r"^check\(", sections["## Solution"], re.MULTILINE)


@each_tutorial
def test_nobody_sees_a_solution_before_asking_for_it(tutorial):
    """The player waits before a section; so the blank and its solution must not be in the same one."""
    for cell in tutorial.cells:
        if not cell.is_prose:
            assert not ("def check(" in cell.text and re.search(r"^check\(", cell.text, re.MULTILINE))


@pytest.mark.real_model
@each_tutorial
def test_it_runs_green_and_tells_a_wrong_answer_from_the_right_one(tutorial, capsys):
    """A reader who types a wrong answer before looking at the solution."""
    answers = iter([WRONG_ANSWERS[tutorial.number]])

    def read_line(prompt):
        return next(answers, "") if prompt.startswith("check(") else ""

    status = Player(tutorial, Console(), read_line).play()
    errors = capsys.readouterr().err
    assert status == 0, errors
    assert next(answers, "nobody asked") == "nobody asked"
    assert re.search(r"AssertionError: \w", errors), "a wrong answer must be told so, with a hint"
