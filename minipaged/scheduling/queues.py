"""The queues, each in order of arrival, and the one way from one into another."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from minipaged.scheduling.group import GroupState, SequenceGroup


@dataclass(slots=True)
class Queues:
    """A preempted group arrived before every group that never ran, so order of arrival brings it back before them."""

    waiting: list[SequenceGroup] = field(default_factory=list)
    running: list[SequenceGroup] = field(default_factory=list)
    swapped: list[SequenceGroup] = field(default_factory=list)

    def add(self, group: SequenceGroup) -> None:
        """Into the queue of its state."""
        bisect.insort(self._of(group), group, key=lambda g: g.number)

    def move(self, group: SequenceGroup, state: GroupState) -> None:
        """Out of its queue and into that of its new state; a finished group is in none."""
        self._of(group).remove(group)
        group.move_to(state)
        if state is not GroupState.FINISHED:
            self.add(group)

    def _of(self, group: SequenceGroup) -> list[SequenceGroup]:
        if group.state is GroupState.WAITING:
            return self.waiting
        return self.running if group.state is GroupState.RUNNING else self.swapped
