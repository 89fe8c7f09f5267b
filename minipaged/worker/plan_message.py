"""The control message: what rank 0 sends in a step so that the others apply its plan (paper, section 4.6).

    header      step, and how many of each follow
    moves       swap_out, swap_in, copies: pairs of blocks
    rows        sequence, start, table version; the token ids; the block table
    logits      which tokens' scores will be gathered

All of it 32-bit integers. Sampling rules, seeds and histories stay on rank 0, which alone draws. Of a block table only
the end that changed is sent, as "keep so many entries, then these": in most decode steps that is nothing. Both sides
remember the rows of the last step, and no others, so they agree without a word on what the other one knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from minipaged.step import SequenceWork, StepPlan


class Table(NamedTuple):
    """A block table as it was in the last step, and its version."""

    version: int
    blocks: tuple[int, ...]


Tables = dict[int, Table]  # by sequence


class PlanWriter:
    """Rank 0's side: plans to messages."""

    def __init__(self) -> None:
        self._known: Tables = {}

    def write(self, plan: StepPlan, logit_rows: list[list[int]]) -> bytes:
        """The message for one plan. The readers must be given every message, in order."""
        moves = (plan.swap_out, plan.swap_in, plan.copies)
        message = array("i", (plan.step, *map(len, moves), len(plan.work), len(logit_rows)))
        message.extend(chain.from_iterable(chain.from_iterable(moves)))
        for row in plan.work:
            kept = self._num_kept(row)
            new = row.block_table[kept:]
            message.extend((row.seq_id, row.start, row.table_version, len(row.token_ids), kept, len(new)))
            message.extend(row.token_ids)
            message.extend(new)
        for rows in logit_rows:
            message.append(len(rows))
            message.extend(rows)
        self._known = _tables_of(plan.work)
        return message.tobytes()

    def _num_kept(self, row: SequenceWork) -> int:
        """How many of the row's first blocks its reader has already."""
        known = self._known.get(row.seq_id)
        if known is None:
            return 0
        if known.version == row.table_version:
            return len(row.block_table)
        pairs = enumerate(zip(known.blocks, row.block_table, strict=False))
        first_other = next((i for i, (old, new) in pairs if old != new), None)
        return min(len(known.blocks), len(row.block_table)) if first_other is None else first_other


class PlanReader:
    """The other ranks' side: messages to plans."""

    def __init__(self) -> None:
        self._known: Tables = {}

    def read(self, message: bytes) -> tuple[StepPlan, list[list[int]]]:
        """The plan without its sampling, and the tokens whose logits will be gathered."""
        numbers = iter(array("i", message))
        step, num_out, num_in, num_copies, num_rows, num_batches = _take(numbers, 6)
        moves = [_pairs(_take(numbers, 2 * count)) for count in (num_out, num_in, num_copies)]
        work = tuple(self._read_row(numbers) for _ in range(num_rows))
        logit_rows = [list(_take(numbers, next(numbers))) for _ in range(num_batches)]
        self._known = _tables_of(work)
        return StepPlan(step, work, (), *moves), logit_rows

    def _read_row(self, numbers: Iterator[int]) -> SequenceWork:
        seq_id, start, version, num_tokens, kept, num_new = _take(numbers, 6)
        token_ids = _take(numbers, num_tokens)
        old = self._known[seq_id].blocks[:kept] if kept else ()
        return SequenceWork(seq_id, token_ids, start, old + _take(numbers, num_new), version)


def _tables_of(work: Iterable[SequenceWork]) -> Tables:
    return {row.seq_id: Table(row.table_version, row.block_table) for row in work}


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(islice(numbers, count))


def _pairs(flat: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))
