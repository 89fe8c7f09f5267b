"""Drives a scheduler with the shadow worker, as the engine does, and checks every law of the scheduler at each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from minipaged.blocks.manager import BlockManager
from minipaged.config import SchedulerConfig
from minipaged.scheduling.group import GroupState, SequenceGroup
from minipaged.scheduling.scheduler import Schedule, Scheduler
from minipaged.scheduling.sequence import Sequence
from tests.shadow_worker import ShadowWorker


@dataclass
class Driver:
    """One control plane over a shadow pool. `finished` holds each request's finish reason and output tokens."""

    num_blocks: int
    block_size: int = 4
    max_num_seqs: int = 64
    budget: int = 256
    chunked: bool = True
    policy: object = None
    free_order: list[int] | None = None
    finished: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self):
        config = SchedulerConfig(self.max_num_seqs, self.budget, self.chunked)
        self.blocks = BlockManager(self.num_blocks, self.block_size, self.free_order)
        self.scheduler = Scheduler(config, self.blocks, self.policy)
        self.worker = ShadowWorker(self.num_blocks, self.block_size)
        self.max_tokens: dict[str, int] = {}

    def add(self, name: str, prompt_length: int, max_tokens: int) -> SequenceGroup:
        number = len(self.max_tokens)
        prompt = tuple((number * 7 + i) % 50 for i in range(prompt_length))
        group = SequenceGroup(name, number, [Sequence(number, prompt, seed=number)])
        self.max_tokens[name] = max_tokens
        self.scheduler.add(group)
        return group

    def plan(self) -> Schedule:
        before = {g.request_id: g.number for g in self.scheduler.running}
        schedule = self.scheduler.schedule()
        self._check(schedule, before)
        return schedule

    def apply(self, schedule: Schedule) -> None:
        result = self.worker.execute(schedule.plan)
        for group in schedule.outgrown:
            self._record(group)
        self.scheduler.advance(schedule)
        for entry, (draw,) in zip(schedule.plan.sampling, result.entries, strict=True):
            group, seq, _ = schedule.shares[entry.row]
            if seq.is_finished:  # aborted between plan and apply
                continue
            seq.append(draw.token_id)
            if seq.num_output_tokens == self.max_tokens[group.request_id]:
                self.scheduler.finish(seq, group, "length")
                self._record(group)
        self.scheduler.check()

    def step(self) -> Schedule:
        schedule = self.plan()
        self.apply(schedule)
        return schedule

    def run(self, limit: int = 10_000) -> int:
        """Step until everything is finished; returns the number of steps. A stall fails at once."""
        steps = empty = 0
        while self.scheduler.has_unfinished:
            empty = 0 if self.step().plan.work else empty + 1
            assert empty < 2, "two empty steps in a row while work exists"
            steps += 1
            assert steps < limit, "no end in sight"
        assert self.blocks.num_free == self.num_blocks, "blocks did not come back"
        assert not self.blocks.tables()
        return steps

    def _record(self, group: SequenceGroup) -> None:
        assert group.request_id not in self.finished, "reported finished twice"
        [seq] = group.sequences
        self.finished[group.request_id] = (seq.finish_reason, seq.output_token_ids)

    def _check(self, schedule: Schedule, ran_before: dict[str, int]) -> None:
        self.scheduler.check()
        plan = schedule.plan
        assert plan.num_tokens <= self.budget
        assert len({row.seq_id for row in plan.work}) == len(plan.work)
        assert sum(len(group.live) for group in self.scheduler.running) <= self.max_num_seqs
        for group in self.scheduler.waiting:
            assert all(seq.num_computed == 0 and seq.seq_id not in self.blocks for seq in group.live)
        admitted = [g for g in self.scheduler.running if g.request_id not in ran_before]
        assert not (admitted and schedule.preempted), "admitted in a step that preempted"
        waiting_before_them = [g for g in self.scheduler.waiting if admitted and g.number < admitted[-1].number]
        assert not waiting_before_them, "a later request was admitted before an earlier one"
        assert all(group.state is GroupState.WAITING for group in schedule.preempted)
