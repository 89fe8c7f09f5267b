"""What stands in each slot, known from the plans alone: whoever has seen every plan knows which token went where.

    plan: copy 1 → 3, then A's token at position 7, block table 7 3        block 3:  years  ago  our  +fathers

It is a second look at the order inside a step (step.py): swap out, swap in, copies, writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minipaged.show.frame import Frame
from minipaged.step import StepPlan

Words = Mapping[int, str]  # the text of a token, by token id


class Contents:
    """Token ids by block: `device[block][slot]`, `host[block][slot]`; a slot that nobody has written holds None."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: dict[int, list[int | None]] = {}
        self.host: dict[int, list[int | None]] = {}

    def apply(self, plan: StepPlan) -> None:
        """What the worker does with a plan, done to token ids."""
        for source, destination in plan.swap_out:
            self.host[destination] = list(self._block(self.device, source))
        for source, destination in plan.swap_in:
            self.device[destination] = list(self._block(self.host, source))
        for source, destination in plan.copies:
            self.device[destination] = list(self._block(self.device, source))
        for row in plan.work:
            for position, token_id in enumerate(row.token_ids, row.start):
                logical, slot = divmod(position, self.block_size)
                self._block(self.device, row.block_table[logical])[slot] = token_id

    def _block(self, pool: dict[int, list[int | None]], block: int) -> list[int | None]:
        return pool.setdefault(block, [None] * self.block_size)


def contents_at(frames: Sequence[Frame], index: int = -1) -> Contents:
    """What the slots hold once the plan of that frame is applied. Frames of another engine before it do not count."""
    index = range(len(frames))[index]
    begin = index
    while begin and _follows(frames[begin - 1], frames[begin]):
        begin -= 1
    contents = Contents(frames[index].snapshot.block_size)
    for frame in frames[begin : index + 1]:
        contents.apply(frame.plan)
    return contents


def _follows(before: Frame, after: Frame) -> bool:
    return before.plan.step < after.plan.step and before.snapshot.block_size == after.snapshot.block_size


def spell(token_id: int | None, words: Words | None) -> str:
    """A token for human eyes, on one line: its text where it is known, its number where it is not."""
    if token_id is None:
        return "?"
    if words is None or token_id not in words:
        return f"#{token_id}"
    text = words[token_id].replace("\n", "⏎").replace("\t", "⇥")
    return "".join(letter if letter.isprintable() else "�" for letter in text)
