"""Ranks as threads of this process: the workers, messages and collectives of several ranks without their processes.

    engine, workers = make_parallel_engine(directory, size=3, num_blocks=20)
    workers[2].cache        what rank 2 holds, to look at

All ranks' pools are full of NaN. A rank that raises breaks the barrier for all.
"""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from minipaged.engine.llm_engine import LLMEngine
from minipaged.text.tokenizer import Tokenizer
from minipaged.worker.parallel_worker import ParallelWorker, collect_held_bytes
from minipaged.worker.rank import follow
from minipaged.worker.rank_processes import RankProcesses
from minipaged.worker.torch_ranks import PeerLost
from minipaged.worker.worker import Worker
from tests.tiny_engine import fill_pools, tiny_engine_args


class ThreadRanks:
    """One thread's view of its fellows; `all_ranks(k)` makes the k that belong together."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, places: list, messages: list) -> None:
        self.rank = rank
        self.size = size
        self.is_connected = True
        self._barrier = barrier
        self._places = places
        self._messages = messages

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = self._exchange(x)
        return parts if self.rank == 0 else [x]

    def collect(self, number: int) -> list[int]:
        return self._exchange(number)

    def send(self, message: bytes) -> None:
        for queue in self._messages:
            queue.put(message)

    def receive(self) -> bytes:
        return self._messages[self.rank].get()

    def connect(self, store: Any, device: torch.device) -> None: ...

    def disconnect(self) -> None:
        self.is_connected = False

    def break_off(self) -> None:
        """The end of this rank is the end of all."""
        self._barrier.abort()

    def _exchange(self, value: Any) -> list:
        self._places[self.rank] = value
        try:
            self._barrier.wait(30)
            everything = list(self._places)
            self._barrier.wait(30)  # nobody writes the next value before all have read this one
        except threading.BrokenBarrierError as error:
            raise PeerLost("a thread has ended") from error
        return everything


def all_ranks(size: int) -> list[ThreadRanks]:
    shared = threading.Barrier(size), [None] * size, [SimpleQueue() for _ in range(size)]
    return [ThreadRanks(rank, size, *shared) for rank in range(size)]


def in_threads(ranks: list[ThreadRanks], work: Any) -> list[Any]:
    """`work(ranks)` for each rank at the same time; the results, rank by rank."""
    results: list[Any] = [None] * len(ranks)

    def run(own: ThreadRanks) -> None:
        try:
            results[own.rank] = work(own)
        except BaseException as error:
            results[own.rank] = error
            own.break_off()

    threads = [threading.Thread(target=run, args=(own,), daemon=True) for own in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, PeerLost):
            raise result
    return results


class NoMeeting:
    """Threads need not find each other."""

    store = None
    processes = RankProcesses()

    def wait_for_all(self) -> None: ...


def make_parallel_engine(
    directory: Path,
    size: int,
    num_blocks: int,
    policy: Any = None,
    free_order: Any = None,
    tokenizer: Tokenizer | None = None,
    **args: Any,
) -> tuple[LLMEngine, list[Worker]]:
    """An engine over `size` ranks, and their workers. The arguments are those of tiny_engine.make_engine."""
    args = tiny_engine_args(directory, num_blocks, **args)
    ranks = all_ranks(size)
    workers = [ParallelWorker(args, ranks[0], NoMeeting())] + [Worker(args, own) for own in ranks[1:]]
    budget = args.scheduler_config(workers[0].max_model_len).max_num_batched_tokens

    def start(own: ThreadRanks) -> None:
        worker = workers[own.rank]
        worker.load(budget)
        if own.rank > 0:
            collect_held_bytes(worker)
        with torch.inference_mode():
            fill_pools(worker, float("nan"))

    in_threads(ranks, start)
    for worker in workers[1:]:
        threading.Thread(target=_follow, args=(worker,), daemon=True).start()
    return LLMEngine(args, workers[0], tokenizer, policy=policy, free_order=free_order), workers


def _follow(worker: Worker) -> None:
    try:
        follow(worker, worker.ranks)
    except BaseException:
        worker.ranks.break_off()
        raise
