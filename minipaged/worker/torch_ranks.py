"""Ranks in several processes, over torch.distributed: gloo on CPUs, NCCL on CUDA (which is untested here).

    rank 0  ── plan ──▶ all           two broadcasts a step: how many bytes, and the bytes
    all     ◀─ sums ──▶ all           one all-reduce for the embedding, two a layer
    all     ── logits ─▶ rank 0       one gather (and one for each piece of a prompt that is scored)

These are process groups of their own, not torch's global one, so several engines can live in one process, and a
program's own use of torch.distributed is none of their business.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CONNECT_TIMEOUT = timedelta(seconds=10)  # all ranks are there, and call `connect`
STEP_TIMEOUT = timedelta(minutes=10)  # a rank that lives but does not answer for so long is taken for lost
END_TIMEOUT = timedelta(seconds=5)  # for saying that there will be no more plans
IDLE_TIMEOUT = timedelta(days=365)  # between two plans there may be any time


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU the ranks share the cores: while inside, torch has one thread, unless the user says OMP_NUM_THREADS."""
    before = torch.get_num_threads()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PeerLost(Exception):
    """A collective failed, in all likelihood because another rank has ended."""


class TorchRanks:
    """This process's view of its fellows. Not connected until `connect`.

    `traffic` counts the collectives by name, and the bytes of plans, since the beginning.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic: Counter[str] = Counter()
        self._control: Any = None  # plans and small numbers, always on the CPU
        self._data: Any = None  # hidden states and logits, where the model is

    def connect(self, store: dist.Store, device: torch.device) -> None:
        """Connect all ranks with each other, once all are there. Everything is on this one machine."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = CONNECT_TIMEOUT
        group = dist.PrefixStore("control", store), self.rank, self.size
        self._control = self._data = _noticing_loss(dist.ProcessGroupGloo, *group, options)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            group = dist.PrefixStore("data", store), self.rank, self.size
            self._data = _noticing_loss(dist.ProcessGroupNCCL, *group, STEP_TIMEOUT)

    @property
    def is_connected(self) -> bool:
        return self._control is not None

    def disconnect(self) -> None:
        """Close the connections; whoever waits for this rank then raises PeerLost."""
        self._control = self._data = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks.all_reduce."""
        x = x.contiguous()
        self._run("all_reduce", self._data.allreduce, [x], _options(dist.AllreduceOptions))
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See Ranks.gather."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        places = [parts] if self.rank == 0 else []
        self._run("gather", self._data.gather, places, [x], _options(dist.GatherOptions, rootRank=0))
        return parts or [x]

    def collect(self, number: int) -> list[int]:
        """See Ranks.collect."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number  # the sum of all such vectors has every number in its place
        self._run("collect", self._control.allreduce, [numbers], _options(dist.AllreduceOptions))
        return numbers.tolist()

    def send(self, message: bytes) -> None:
        """Rank 0 to all others. An empty message says that there will be no more."""
        self._broadcast(torch.tensor([len(message)]), STEP_TIMEOUT if message else END_TIMEOUT)
        if message:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), STEP_TIMEOUT)
        self.traffic["plan bytes"] += len(message)

    def receive(self) -> bytes:
        """The next message of rank 0, whenever it comes."""
        length = torch.empty(1, dtype=torch.int64)
        self._broadcast(length, IDLE_TIMEOUT)
        message = torch.empty(int(length), dtype=torch.uint8)
        if len(message):
            self._broadcast(message, STEP_TIMEOUT)
        return message.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor, timeout: timedelta) -> None:
        options = _options(dist.BroadcastOptions, timeout, rootRank=0, rootTensor=0)
        self._run("broadcast", self._control.broadcast, [tensor], options)

    def _run(self, name: str, collective: Callable[..., Any], *args: Any) -> None:
        _noticing_loss(lambda: collective(*args).wait())
        self.traffic[name] += 1


def _options(kind: type, timeout: timedelta = STEP_TIMEOUT, **fields: int) -> Any:
    options = kind()
    options.timeout = timeout
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _noticing_loss(operation: Callable[..., Any], *args: Any) -> Any:
    """Torch raises RuntimeError for whatever goes wrong between processes."""
    try:
        return operation(*args)
    except RuntimeError as error:
        raise PeerLost(str(error).partition(". ")[0]) from error  # behind it, torch guesses
