"""What a viewer sees of one moment: tables, reference counts, queues, and what has just happened to blocks.

Plain data, made only when somebody looks (`on_step`), so that pictures never reach into the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from minipaged.step import StepPlan, StepResult


class LogicalBlock(NamedTuple):
    """An entry of a block table: which physical block it is, and how many of its slots are filled (paper, Figure 6)."""

    physical_block: int
    num_filled: int


class BlockEvent(NamedTuple):
    """Something that happened to device blocks: kind is allocate, free, fork, copy, hit, evict, swap_out or swap_in."""

    kind: str
    seq_id: int | None
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The moment after a plan was made and before it is applied."""

    step: int
    block_size: int
    tables: Mapping[int, tuple[LogicalBlock, ...]]  # by sequence number
    host_tables: Mapping[int, tuple[LogicalBlock, ...]]  # of swapped sequences, whose blocks are those of the host pool
    ref_counts: tuple[int, ...]  # of each device block; 0 is free
    host_ref_counts: tuple[int, ...]  # of each host block; empty where there is no host pool
    cached: frozenset[int]  # the free blocks that are kept for their content
    groups: Mapping[str, tuple[int, ...]]  # the live sequence numbers of each request that has not finished
    waiting: tuple[str, ...]  # request ids, first come first
    running: tuple[str, ...]
    swapped: tuple[str, ...]
    preempted: tuple[str, ...]  # those that this step put out
    events: tuple[BlockEvent, ...]  # since the step before

    @property
    def num_used_blocks(self) -> int:
        return sum(count > 0 for count in self.ref_counts)

    @property
    def num_filled(self) -> int:
        """Filled slots, each counted once: a shared block is one block."""
        return sum({block: filled for table in self.tables.values() for block, filled in table}.values())


OnStep = Callable[[StepPlan, StepResult, Snapshot], None]  # a viewer
