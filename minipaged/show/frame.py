"""A frame: all that one step shows of itself. Everything that `show` draws, it draws from this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from minipaged.snapshot import LogicalBlock, Snapshot
from minipaged.step import Sample, ScorePrompt, StepPlan, StepResult

Tables = Mapping[int, tuple[LogicalBlock, ...]]


class Frame(NamedTuple):
    """What `on_step` is called with: the plan, the answer, and the moment between them."""

    plan: StepPlan
    result: StepResult
    snapshot: Snapshot


def make_snapshot(
    block_size: int, num_blocks: int, tables: Mapping[int, Iterable[tuple[int, int]]], **others: Any
) -> Snapshot:
    """A snapshot by hand, for a picture without an engine: `tables` has (physical block, #filled) pairs by sequence.

    Reference counts are what the tables make them; `others` are fields of Snapshot that are not to be empty. Host
    tables are given as `host_tables`, and counted where `num_host_blocks` says how large their pool is.
    """
    device = _tables(tables)
    host = _tables(others.pop("host_tables", {}))
    fields: dict[str, Any] = {
        "step": 0,
        "ref_counts": _count(device, num_blocks),
        "host_ref_counts": _count(host, others.pop("num_host_blocks", 0)),
        "cached": frozenset(),
        "groups": {f"request {seq_id}": (seq_id,) for seq_id in [*device, *host]},
        "waiting": (),
        "running": tuple(f"request {seq_id}" for seq_id in device),
        "swapped": tuple(f"request {seq_id}" for seq_id in host),
        "preempted": (),
        "events": (),
    }
    return Snapshot(block_size=block_size, tables=device, host_tables=host, **(fields | others))


def token_ids(frame: Frame) -> Iterator[int]:
    """Every token that a picture of this frame may want to spell."""
    for row in frame.plan.work:
        yield from row.token_ids
    for entry, answer in zip(frame.plan.sampling, frame.result.entries, strict=True):
        if not isinstance(entry, ScorePrompt):
            yield from (token.token_id for token in (answer if isinstance(entry, Sample) else answer[:1]))


def holders(tables: Tables) -> dict[int, tuple[int, ...]]:
    """The sequences whose tables name a block, by block."""
    found: dict[int, tuple[int, ...]] = {}
    for seq_id, table in sorted(tables.items()):
        for block, _ in table:
            found[block] = (*found.get(block, ()), seq_id)
    return found


def fills(tables: Tables) -> dict[int, int]:
    """How many slots of a block are filled, by block."""
    return {block: filled for table in tables.values() for block, filled in table}


def _tables(tables: Mapping[int, Iterable[tuple[int, int]]]) -> dict[int, tuple[LogicalBlock, ...]]:
    return {seq_id: tuple(LogicalBlock(*entry) for entry in table) for seq_id, table in tables.items()}


def _count(tables: Tables, num_blocks: int) -> tuple[int, ...]:
    counted = Counter(block for table in tables.values() for block, _ in table)
    return tuple(counted[block] for block in range(num_blocks))
