"""A rank other than 0: applies what it is sent, and answers nobody.

    message ──▶ plan ──▶ moves, model ──▶ its share of the logits ──▶ rank 0

`python -m minipaged.worker.rank` is how an engine starts it (rank_processes.py); under torchrun, `LLM(...)` becomes it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.engine_args import EngineArgs
    from minipaged.worker.meeting import Meeting
    from minipaged.worker.torch_ranks import TorchRanks
    from minipaged.worker.worker import Worker


@dataclass(frozen=True)
class Start:
    """What a rank must know to begin."""

    args: EngineArgs
    rank: int
    size: int
    port: int  # where rank 0 has its store, on this machine
    parent: int  # rank 0's process


def serve(args: EngineArgs, ranks: TorchRanks, meeting: Meeting) -> None:
    """A whole life, from the weights to the last plan. What it raises, the meeting knows."""
    from minipaged.worker.parallel_worker import collect_held_bytes
    from minipaged.worker.torch_ranks import one_thread
    from minipaged.worker.worker import Worker

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to decide on
    try:
        worker = Worker(args, ranks)
        meeting.announce(ranks.rank)
        ranks.connect(meeting.store, worker.device)
        with one_thread(worker.device):
            worker.load(args.scheduler_config(worker.max_model_len).max_num_batched_tokens)
            collect_held_bytes(worker)
            follow(worker, ranks)
    except BaseException as error:
        meeting.report(ranks.rank, error)
        raise


def follow(worker: Worker, ranks: TorchRanks) -> None:
    """Apply plan after plan, until there are no more."""
    import torch

    from minipaged.worker.plan_message import PlanReader

    reader = PlanReader()
    with torch.inference_mode():
        while message := ranks.receive():
            plan, logit_rows = reader.read(message)
            hidden = worker.forward(plan)
            for rows in logit_rows:
                worker.model.compute_logits(hidden[rows])


def main() -> int:
    """Serve until rank 0 says that there is no more, or is gone; returns the exit status. `Start` comes by stdin."""
    start: Start = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(start.parent,), daemon=True).start()
    # Imported only now, since torch takes seconds: should rank 0 end meanwhile, so does this process.
    from minipaged.worker.meeting import Meeting, open_store
    from minipaged.worker.torch_ranks import TorchRanks

    meeting = Meeting(open_store("127.0.0.1", start.port, is_host=False), start.size)
    try:
        serve(start.args, TorchRanks(start.rank, start.size), meeting)
    except BaseException:
        return 1  # rank 0 tells why
    return 0


def _end_with(parent: int) -> None:
    """End this process when rank 0's does: its end of the pipe closes (unless a fork of it has that open, too)."""
    import select

    while os.getppid() == parent:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], 1.0)
        if ready and not os.read(sys.stdin.fileno(), 1):
            break
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
