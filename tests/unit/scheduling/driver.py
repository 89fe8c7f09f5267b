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
    mode: str = "auto"
    num_host_blocks: int = 0
    chunk_border: int = 1
    finished: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self):
        config = SchedulerConfig(self.max_num_seqs, self.budget, self.chunked, self.chunk_border, self.mode)
        self.blocks = BlockManager(self.num_blocks, self.block_size, self.free_order)
        self.host = BlockManager(self.num_host_blocks, self.block_size, pool="host")
        self.scheduler = Scheduler(config, self.blocks, self.policy, host=self.host)
        self.worker = ShadowWorker(self.num_blocks, self.block_size, num_host_blocks=self.num_host_blocks)
        self.max_tokens: dict[str, int] = {}

    def add(self, name: str, prompt_length: int, max_tokens: int) -> SequenceGroup:
        number = len(self.max_tokens)
        prompt = tuple((number * 7 + i) % 50 for i in range(prompt_length))
        group = SequenceGroup(name, number, [Sequence(number, prompt, seed=number)])
        self.max_tokens[name] = max_tokens
        self.scheduler.add(group)
        return group

    def plan(self) -> Schedule:
        running = {g.request_id for g in self.scheduler.running}
        swapped = {g.request_id for g in self.scheduler.swapped}
        schedule = self.scheduler.schedule()
        self._check(schedule, running, swapped)
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
            empty = empty + 1 if self.step().plan.is_empty else 0
            assert empty < 2, "two empty steps in a row while work exists"
            steps += 1
            assert steps < limit, "no end in sight"
        for pool in (self.blocks, self.host):
            assert pool.num_free == pool.num_blocks, "blocks did not come back"
            assert not pool.tables()
        return steps

    def _record(self, group: SequenceGroup) -> None:
        assert group.request_id not in self.finished, "reported finished twice"
        [seq] = group.sequences
        self.finished[group.request_id] = (seq.finish_reason, seq.output_token_ids)

    def _check(self, schedule: Schedule, ran_before: set[str], swapped_before: set[str]) -> None:
        self.scheduler.check()
        plan = schedule.plan
        assert plan.num_tokens <= self.budget
        assert len({row.seq_id for row in plan.work}) == len(plan.work)
        assert sum(len(group.live) for group in self.scheduler.running) <= self.max_num_seqs
        for group in self.scheduler.waiting:
            assert all(seq.num_computed == 0 and seq.seq_id not in self.blocks for seq in group.live)
        for group in self.scheduler.swapped:
            assert all(seq.seq_id in self.host for seq in group.live)
        assert not (plan.swap_out and plan.swap_in)
        running = {g.request_id: g for g in self.scheduler.running}
        admitted = [g for name, g in running.items() if name not in ran_before]
        came_back = [g for g in admitted if g.request_id in swapped_before]
        began = [g for g in admitted if g.request_id not in swapped_before]
        assert not (admitted and schedule.preempted), "admitted in a step that preempted"
        assert not (began and self.scheduler.swapped), "somebody began while others are swapped"
        for entered, behind in ((came_back, self.scheduler.swapped), (began, self.scheduler.waiting)):
            earlier = [g for g in behind if entered and g.number < entered[-1].number]
            assert not earlier, "a later request was admitted before an earlier one"
        assert not any(group.state is GroupState.RUNNING for group in schedule.preempted)
