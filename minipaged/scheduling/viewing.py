"""The moment, for those who draw it: after a plan was made, or between two steps."""

from __future__ import annotations

from minipaged.blocks.manager import BlockManager
from minipaged.scheduling.group import SequenceGroup
from minipaged.scheduling.scheduler import Schedule, Scheduler
from minipaged.snapshot import LogicalBlock, Snapshot


def take_snapshot(scheduler: Scheduler, schedule: Schedule | None = None) -> Snapshot:
    """Copies everything: the snapshot stays what it is while the scheduler goes on. No schedule: between two steps."""
    blocks, host = scheduler.blocks, scheduler.host
    return Snapshot(
        step=scheduler.num_steps if schedule is None else schedule.plan.step,
        block_size=blocks.block_size,
        tables=_tables(blocks),
        host_tables=_tables(host),
        ref_counts=blocks.allocator.ref_counts,
        host_ref_counts=host.allocator.ref_counts,
        cached=frozenset(blocks.allocator.cached),
        groups={group.request_id: tuple(seq.seq_id for seq in group.live) for group in scheduler.groups},
        waiting=_names(scheduler.waiting),
        running=_names(scheduler.running),
        swapped=_names(scheduler.swapped),
        preempted=() if schedule is None else _names(schedule.preempted),
        events=tuple(blocks.events),
    )


def _tables(manager: BlockManager) -> dict[int, tuple[LogicalBlock, ...]]:
    return {seq_id: table.entries() for seq_id, table in manager.tables().items()}


def _names(groups: tuple[SequenceGroup, ...]) -> tuple[str, ...]:
    return tuple(group.request_id for group in groups)
