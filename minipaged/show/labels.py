"""What a sequence is called and how it is coloured: a letter, the same in every picture, since the number decides it.

Pictures must be readable without colour (monochrome, NO_COLOR, colour-blind eyes): colour only repeats what a letter
or a symbol says.
"""

from __future__ import annotations

from collections.abc import Iterable

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


def label(seq_id: int) -> str:
    """A … Z for the first 26 sequences, then A1 … Z1, A2 …"""
    rounds, place = divmod(seq_id, 26)
    return chr(ord("A") + place) + (str(rounds) if rounds else "")


def colour(seq_id: int) -> str:
    return COLOURS[seq_id % len(COLOURS)]


def listed(names: Iterable[object]) -> str:
    """As people list things: "A", "A and B", "A, B and C"."""
    *first, last = [str(name) for name in names]
    return f"{', '.join(first)} and {last}" if first else last


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, with runs drawn together: "7 1 3", "12–19 4"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)
