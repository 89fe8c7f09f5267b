"""Rank 0 of several: to the engine a worker like any other.

    plan ─┬─ message ──▶ ranks 1, 2, …     (plan_message.py)
          └─ applied here as well, on this rank's share; then, here alone, the draws ──▶ result

It is all or none: whatever ends one rank, or a step in its middle, ends them all, for ranks that are not in step cannot
go on. The requests of that step end with the error, and so does every later one.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
import weakref
from typing import NamedTuple

from minipaged.engine_args import EngineArgs
from minipaged.errors import EngineDead, RankFailed
from minipaged.model.parallel import weight_bytes
from minipaged.step import StepPlan, StepResult
from minipaged.worker.meeting import Meeting
from minipaged.worker.plan_message import PlanWriter
from minipaged.worker.rank import Start
from minipaged.worker.rank_processes import RankProcesses
from minipaged.worker.results import logit_rows
from minipaged.worker.torch_ranks import PeerLost, TorchRanks, one_thread
from minipaged.worker.worker import Worker


class HeldBytes(NamedTuple):
    """What one rank holds."""

    weights: int
    kv: int


class ParallelWorker(Worker):
    """`Worker`, with the others behind it. They end with this object (`close`, or when nobody holds it any more)."""

    def __init__(self, args: EngineArgs, ranks: TorchRanks, meeting: Meeting) -> None:
        super().__init__(args, ranks)
        self.processes = meeting.processes
        self.held_bytes: list[HeldBytes] = []  # by rank, once loaded
        self._meeting = meeting
        self._writer = PlanWriter()
        self._end = weakref.finalize(self, _end_all, ranks, self.processes, os.getpid())
        self._reason = "it was closed"

    def start_ranks(self, port: int) -> None:
        """Start a process for each of the other ranks."""
        size = self.ranks.size
        args = dataclasses.replace(self.args, model=self.path, tokenizer=None, tensor_parallel_size=size)
        try:
            for rank in range(1, size):
                self.processes.start(rank, Start(args, rank, size, port, os.getpid()))
        except BaseException:
            self.close()
            raise

    def load(self, max_num_batched_tokens: int) -> None:
        """Meet the others, and load as they do. Raises RankFailed where one of them cannot."""
        try:
            self._meeting.wait_for_all()
            self.ranks.connect(self._meeting.store, self.device)
            with one_thread(self.device):
                super().load(max_num_batched_tokens)
            self.held_bytes = collect_held_bytes(self)
        except PeerLost as loss:
            raise self._give_up(self._meeting.explain(loss)) from None
        except BaseException as error:
            self._give_up(error)
            raise

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises RankFailed if a rank ends meanwhile, and EngineDead ever after."""
        if not self._end.alive:
            raise EngineDead(f"this engine can run no more steps: {self._reason}")
        message = self._writer.write(plan, logit_rows(plan))
        try:
            self.ranks.send(message)
            with one_thread(self.device):
                return super().execute(plan)
        except PeerLost as loss:
            raise self._give_up(self._meeting.explain(loss)) from None
        except Exception as error:
            raise self._give_up(RankFailed(0, f"raised:\n{traceback.format_exc()}")) from error
        except BaseException as interrupt:
            self._give_up(interrupt)
            raise

    def close(self) -> None:
        """End the other ranks. Again is no error."""
        self._end()

    def _give_up(self, reason: BaseException) -> BaseException:
        self._reason = str(reason) or f"{type(reason).__name__} in the middle of a step"
        self.ranks.disconnect()
        self._end()
        return reason


def collect_held_bytes(worker: Worker) -> list[HeldBytes]:
    """Of each rank, on every rank. With it each knows that all have loaded."""
    weights = worker.ranks.collect(weight_bytes(worker.model))
    return [HeldBytes(*held) for held in zip(weights, worker.ranks.collect(worker.cache.num_bytes), strict=True)]


def _end_all(ranks: TorchRanks, processes: RankProcesses, owner: int) -> None:
    """The others end on their own if they are told; those that cannot be told, or do not listen, are killed."""
    if os.getpid() != owner:
        return  # a fork of the process that owns the ranks
    is_in_step = ranks.is_connected
    if is_in_step:
        try:
            ranks.send(b"")
        except PeerLost:
            is_in_step = False
    ranks.disconnect()
    processes.end(at_once=not is_in_step)
