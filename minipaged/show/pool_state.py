"""What is to be seen of each block of a pool: who holds it, how often it is referenced, how full it is, what is new."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minipaged.show.frame import Tables, fills, holders
from minipaged.show.labels import colour
from minipaged.snapshot import Snapshot
from minipaged.step import StepPlan


class BlockLook(NamedTuple):
    """One block as the eye shall see it."""

    number: int
    ref_count: int
    seq_ids: tuple[int, ...]  # who holds it; with a reference count and no sequence it is pinned
    num_filled: int
    is_cached: bool
    is_written: bool

    @property
    def is_taken(self) -> bool:
        """Not free, or free and kept for its content."""
        return bool(self.ref_count) or self.is_cached

    @property
    def style(self) -> str:
        """The colour of its first holder."""
        return colour(self.seq_ids[0]) if self.seq_ids else "bold" if self.ref_count else "dim"


@dataclass(frozen=True)
class Pool:
    """The blocks of one pool, and how many slots each has."""

    name: str
    block_size: int
    blocks: tuple[BlockLook, ...]

    def caption(self, separator: str) -> str:
        """How many blocks are in use, and how full those are."""
        used = [block for block in self.blocks if block.ref_count]
        cached = sum(block.is_cached for block in self.blocks)
        filled = sum(block.num_filled for block in used)
        kept = f", {cached} cached" if cached else ""
        slots = f"{separator}{filled} of their {len(used) * self.block_size} slots filled" if used else ""
        return f"{self.name}: {len(used)} of {len(self.blocks)} blocks in use{kept}{slots}"


def device_pool(snapshot: Snapshot, plan: StepPlan | None = None) -> Pool:
    """The device pool. With the plan, what it writes is marked."""
    written = written_blocks(plan, snapshot.block_size) if plan else ()
    return look_at("device pool", snapshot.block_size, snapshot.ref_counts, snapshot.tables, snapshot.cached, written)


def host_pool(snapshot: Snapshot, plan: StepPlan | None = None) -> Pool:
    """The host pool, which has no blocks where nothing is swapped."""
    written = [block for _, block in plan.swap_out] if plan else ()
    return look_at("host", snapshot.block_size, snapshot.host_ref_counts, snapshot.host_tables, (), written)


def look_at(
    name: str,
    block_size: int,
    ref_counts: Sequence[int],
    tables: Tables,
    cached: Collection[int] = (),
    written: Collection[int] = (),
) -> Pool:
    """All blocks of a pool, each with what tables and counts say about it."""
    held_by, filled = holders(tables), fills(tables)
    blocks = (
        BlockLook(
            block, count, held_by.get(block, ()), filled.get(block, block_size), block in cached, block in written
        )
        for block, count in enumerate(ref_counts)
    )
    return Pool(name, block_size, tuple(blocks))


def written_blocks(plan: StepPlan, block_size: int) -> frozenset[int]:
    """The device blocks into which a plan writes: by its work, its copies, and by swapping in."""
    by_work = (
        row.block_table[position // block_size]
        for row in plan.work
        for position in range(row.start, row.start + len(row.token_ids))
    )
    return frozenset(by_work) | {block for _, block in plan.copies} | {block for _, block in plan.swap_in}
