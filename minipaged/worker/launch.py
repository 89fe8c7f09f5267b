"""One rank or several: who starts them, and what the engine gets.

    tensor_parallel_size=1      a Worker
    k, in a plain script        a ParallelWorker, which starts k - 1 processes
    k, under torchrun           in rank 0 a ParallelWorker; the other ranks never return: they serve, and exit

Torchrun (or whoever else starts ranks) tells each process its place by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter
from minipaged.worker.meeting import Meeting, open_store
from minipaged.worker.parallel_worker import ParallelWorker
from minipaged.worker.rank import serve
from minipaged.worker.torch_ranks import TorchRanks
from minipaged.worker.worker import Worker

LOCALHOST = "127.0.0.1"


def make_worker(args: EngineArgs) -> Worker:
    """The worker that these arguments ask for, still without its weights.

    Raises InvalidParameter, with several ranks too, before any weight is read.
    """
    if args.tensor_parallel_size == 1:
        return Worker(args)
    started = max(1, _variable("WORLD_SIZE", default=1))
    size = args.tensor_parallel_size or started
    if size == 1:
        return Worker(args)
    if not args.enforce_eager:
        raise InvalidParameter(
            "enforce_eager", False, "must be True with several ranks: they meet inside of the layers"
        )
    if started == 1:
        return _with_processes_of_its_own(args, size)
    if started != size:
        raise InvalidParameter("tensor_parallel_size", size, f"{started} ranks were started (WORLD_SIZE)")
    return _with_ranks_from_outside(args, size)


@contextmanager
def closing_on_error(worker: Worker) -> Iterator[None]:
    """What fails while an engine is built leaves no rank behind."""
    try:
        yield
    except BaseException:
        worker.close()
        raise


def _with_processes_of_its_own(args: EngineArgs, size: int) -> ParallelWorker:
    store = open_store(LOCALHOST, _port(default=0), is_host=True)
    worker = ParallelWorker(args, TorchRanks(0, size), Meeting(store, size))
    worker.start_ranks(store.port)
    return worker


def _with_ranks_from_outside(args: EngineArgs, size: int) -> ParallelWorker:
    rank = _variable("RANK")
    if _variable("LOCAL_WORLD_SIZE", default=size) != size:
        raise InvalidParameter("LOCAL_WORLD_SIZE", os.environ["LOCAL_WORLD_SIZE"], "all ranks must be on one machine")
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun has the store
    store = open_store(os.environ.get("MASTER_ADDR", LOCALHOST), _port(), is_host)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    meeting = Meeting(dist.PrefixStore(f"minipaged/{attempt}", store), size)
    if rank > 0:
        serve(args, TorchRanks(rank, size), meeting)
        sys.exit()
    if meeting.store.add("engines", 1) > 1:
        raise InvalidParameter("tensor_parallel_size", size, "ranks that were started from outside serve one engine")
    return ParallelWorker(args, TorchRanks(0, size), meeting)


def _port(default: int | None = None) -> int:
    port = _variable("MASTER_PORT", default)
    if port > 65535 or (port == 0 and default is None):
        raise InvalidParameter("MASTER_PORT", port, "must be a port, from 1 to 65535")
    return port


def _variable(name: str, default: int | None = None) -> int:
    """An environment variable that is a number."""
    text = os.environ.get(name) or (None if default is None else str(default))
    if text is None or not text.isdecimal():
        raise InvalidParameter(name, text, "the environment must give a number (is this torchrun?)")
    return int(text)
