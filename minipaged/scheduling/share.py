"""A share: one sequence's part of a step. Decode, prefill, a chunk of a prefill and a recompute are all that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from minipaged.config import SchedulerConfig
from minipaged.scheduling.group import SequenceGroup
from minipaged.scheduling.sequence import Sequence


class Share(NamedTuple):
    """The next `num_tokens` uncomputed tokens of a sequence."""

    group: SequenceGroup
    seq: Sequence
    num_tokens: int

    @property
    def end(self) -> int:
        """How many of the sequence's tokens are in the cache after this step."""
        return self.seq.num_computed + self.num_tokens


def divide(groups: Iterable[SequenceGroup], budget: int, config: SchedulerConfig) -> Iterator[Share]:
    """Divide `budget`, what is left of a step's tokens, over groups in order of arrival.

    Decodes come first, since a prefill can wait and a reader cannot. Without chunked prefill, a sequence is fed whole,
    or not yet, and then nobody behind it either.
    """
    for group in sorted(groups, key=lambda g: g.is_prefill):  # a stable sort: arrival stays the second key
        held_back = _held_back(group, budget)
        for seq in group.live:
            wanted = 0 if seq.stem else seq.num_uncomputed - held_back  # a stem comes before what grows on it
            if wanted > budget and not config.enable_chunked_prefill:
                return
            num_tokens = wanted if wanted <= budget else _chunk(seq.num_computed, budget, config.chunk_border)
            if num_tokens > 0:
                budget -= num_tokens
                yield Share(group, seq, num_tokens)


def _chunk(start: int, budget: int, border: int) -> int:
    """How many tokens to feed from position `start` on: up to a border, or all of the budget where none is in reach."""
    to_border = (start + budget) // border * border - start
    return to_border if to_border > 0 else budget


def _held_back(group: SequenceGroup, budget: int) -> int:
    """How many tokens at each sequence's end must wait: the last one of each beam, until all can speak together."""
    if not group.in_lockstep:
        return 0
    together = not any(seq.stem for seq in group.live) and sum(seq.num_uncomputed for seq in group.live) <= budget
    return 0 if together else 1
