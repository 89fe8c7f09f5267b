"""The scheduler: who runs this step, first come, first served (paper, section 4.5).

A step, in order:

    1. running groups    each keeps its place if the blocks suffice; else the latest arrival is preempted, until
                         the rest fits: swapped out, or recomputed later. Then decodes get their token each, and
                         unfinished prefills what the budget has left.
    2. swapped groups    come back, and then
    3. waiting groups    are admitted, while blocks, budget and max_num_seqs allow (admission.py). Not in a step that
                         preempted: whoever lost its blocks a moment ago would take them back from those who need them.

Everything is decided before anything is reserved, so that a victim never has reserved blocks in the step that puts it
out.

Progress is bounded. The earliest running group is never the victim of another one, and with chunked prefill every step
feeds at least one of its tokens (decodes are at most max_num_seqs ≤ max_num_batched_tokens, so something is left for a
prefill). It can lose this place only to an earlier arrival that comes back, once for each of those. So k groups of at
most T tokens, each of which the pool can hold to its end, are done after at most T · k (k + 1) / 2 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_sharing import PrefixSharing
from minipaged.config import SchedulerConfig
from minipaged.errors import InvariantBroken
from minipaged.scheduling.admission import Admission
from minipaged.scheduling.group import GroupState, SequenceGroup
from minipaged.scheduling.plan_builder import PlanBuilder
from minipaged.scheduling.preemption import PreemptionPolicy, PreemptLatest
from minipaged.scheduling.queues import Queues
from minipaged.scheduling.recompute import demand, give_up_blocks, start_over
from minipaged.scheduling.sequence import Sequence
from minipaged.scheduling.share import Share, divide
from minipaged.scheduling.swapping import Swapping
from minipaged.step import StepPlan


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan for the worker, and what the engine needs beside it."""

    plan: StepPlan
    shares: tuple[Share, ...]  # one for each row of plan.work
    preempted: tuple[SequenceGroup, ...] = ()
    outgrown: tuple[SequenceGroup, ...] = ()  # ended with "length": they need more than the whole pool


class Scheduler:
    """Plans steps over a block manager. It moves no byte: the worker applies the plan, the engine reports back."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        policy: PreemptionPolicy | None = None,
        prefixes: PrefixSharing | None = None,
        host: BlockManager | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.host = BlockManager(0, blocks.block_size, pool="host") if host is None else host
        self.prefixes = prefixes
        self.policy = PreemptLatest() if policy is None else policy
        self._queues = Queues()
        self._swapping = Swapping(config.preemption_mode, blocks, self.host, prefixes)
        self._admission = Admission(config, blocks, prefixes, self._swapping, self._queues)
        self._groups: dict[str, SequenceGroup] = {}
        self.num_steps = 0  # that were planned
        self._is_planned = False  # a plan was begun, and the worker has not applied it
        self._unconfirmed: list[int] = []  # blocks that the prefix cache knows since a plan that is not counted yet
        self._outgrown: list[SequenceGroup] = []  # ended, and in no schedule yet

    # ---------------------------------------------------------------- requests come and go

    @property
    def waiting(self) -> tuple[SequenceGroup, ...]:
        return tuple(self._queues.waiting)

    @property
    def running(self) -> tuple[SequenceGroup, ...]:
        return tuple(self._queues.running)

    @property
    def swapped(self) -> tuple[SequenceGroup, ...]:
        return tuple(self._queues.swapped)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def add(self, group: SequenceGroup) -> None:
        self._groups[group.request_id] = group
        self._queues.add(group)

    @property
    def groups(self) -> tuple[SequenceGroup, ...]:
        """Every unfinished request's."""
        return tuple(self._groups.values())

    def get(self, request_id: str) -> SequenceGroup | None:
        """The unfinished group of that request, if there is one."""
        return self._groups.get(request_id)

    def fork(self, group: SequenceGroup, parent: Sequence, seq_id: int, seed: int) -> Sequence:
        """One more sequence in a running group, which shares all that the parent has."""
        child = parent.fork(seq_id, seed)
        self.blocks.fork(parent.seq_id, seq_id)
        group.sequences.append(child)
        group.num_unforked = max(0, group.num_unforked - 1)
        return child

    def finish(self, seq: Sequence, group: SequenceGroup, reason: str) -> None:
        """One sequence ended: its blocks go back at once. The last one ends its group."""
        seq.finish_reason = reason
        self.blocks.free(seq.seq_id)
        self.host.free(seq.seq_id)
        if not group.live:
            self._queues.move(group, GroupState.FINISHED)
            del self._groups[group.request_id]

    def finish_group(self, group: SequenceGroup, reason: str) -> None:
        """End whatever of the group still lives: abort, error, or no way to go on."""
        for seq in group.live:
            self.finish(seq, group, reason)

    # ---------------------------------------------------------------- one step

    def schedule(self) -> Schedule:
        """Decide the next step and reserve its blocks. The plan's work is empty where nothing can run."""
        if self._is_planned:  # a policy's error or an interrupt broke in, and nobody knows how far the plan got
            start_over(self._queues, self.blocks, self.host)
            self.withdraw()
        self._is_planned = True
        builder = PlanBuilder(self.num_steps, self.blocks, self.prefixes, self._unconfirmed)
        shares, preempted = self._keep_what_fits(builder)
        for share in shares:
            builder.add(share)
        if not preempted:
            for group in self._admission.admit(builder):
                self._end_outgrown(group)
        self.num_steps += 1
        outgrown, self._outgrown = tuple(self._outgrown), []
        put_out = tuple(group for group in preempted if group.state is not GroupState.FINISHED)
        return Schedule(builder.build(), tuple(builder.shares), put_out, outgrown)

    def confirm(self) -> None:
        """The worker has applied the plan: its copies are made, and its tokens' KV is in the cache."""
        self._is_planned = False
        self._swapping.confirm()

    def advance(self, schedule: Schedule) -> None:
        """Count what the applied plan has computed."""
        self.confirm()
        self._unconfirmed.clear()
        for _, seq, num_tokens in schedule.shares:
            if not seq.is_finished:
                seq.num_computed += num_tokens

    def withdraw(self) -> None:
        """The plan was not applied and its requests have ended. The cache must not know what was never computed, and
        what was never copied to the host must be recomputed.
        """
        if self.prefixes is not None:
            self.prefixes.withdraw(self._unconfirmed)
        self._is_planned = False
        self._unconfirmed.clear()
        for group in self._swapping.withdraw():
            self._queues.move(group, GroupState.WAITING)

    def _keep_what_fits(self, builder: PlanBuilder) -> tuple[list[Share], list[SequenceGroup]]:
        """Preempt until the running groups' shares fit into the free blocks; returns the shares and the victims."""
        preempted: list[SequenceGroup] = []
        while self._queues.running:
            shares = list(divide(self._queues.running, self.config.max_num_batched_tokens, self.config))
            needed = self.blocks.num_blocks_needed((share.seq.seq_id, share.end) for share in shares)
            must = needed > self.blocks.num_free
            victim = self.policy.next_victim(tuple(self._queues.running), must)
            if victim is None and not must:
                return shares, preempted
            if victim not in self._queues.running:
                what = f"{victim} ({needed} blocks needed, {self.blocks.num_free} free)"
                raise InvariantBroken(f"{self.policy!r} names no victim that runs: {what}")
            self._preempt(victim, builder)
            preempted.append(victim)
        return [], preempted

    def _preempt(self, group: SequenceGroup, builder: PlanBuilder) -> None:
        """Swap the group out; or take all its blocks, and its prompt and generated tokens wait to be one prefill.

        A group that would not fit into the whole pool could never come back: it ends here and keeps its tokens.
        """
        if self._swapping.takes(group):
            builder.swap_out += self._swapping.swap_out(group)
            self._queues.move(group, GroupState.SWAPPED)
            return
        give_up_blocks(group, self.blocks)
        if demand(group, self.blocks.block_size) > self.blocks.num_blocks:
            self._end_outgrown(group)
        else:
            self._queues.move(group, GroupState.WAITING)

    def _end_outgrown(self, group: SequenceGroup) -> None:
        self.finish_group(group, "length")
        self._outgrown.append(group)

    def check(self) -> None:
        """Each request in exactly one queue, in order; blocks exactly where they belong; the managers' own laws."""
        queues = self._queues.waiting, self._queues.running, self._queues.swapped
        queued = [group for queue in queues for group in queue]
        if sorted(map(id, queued)) != sorted(map(id, self._groups.values())):
            raise InvariantBroken(f"{len(queued)} groups in the queues != {len(self._groups)} unfinished requests")
        for queue in queues:
            if [g.number for g in queue] != sorted(g.number for g in queue):
                raise InvariantBroken(f"a queue is not in order of arrival: {[g.number for g in queue]}")
        for manager, owners in ((self.blocks, self._queues.running), (self.host, self._queues.swapped)):
            astray = set(manager.tables()) - {seq.seq_id for group in owners for seq in group.live}
            if astray:
                raise InvariantBroken(f"sequences {sorted(astray)} have {manager.allocator.pool} blocks and should not")
            manager.check()
        if self.prefixes is not None:
            self.prefixes.check()
