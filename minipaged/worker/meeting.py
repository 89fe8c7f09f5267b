"""The store where ranks find each other, and leave word of why they ended. No step ever uses it."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from minipaged.errors import InvalidParameter, RankFailed
from minipaged.worker.rank_processes import RankProcesses
from minipaged.worker.torch_ranks import PeerLost

STORE_TIMEOUT = timedelta(seconds=30)  # for an answer of the store; torch tries twice
START_SECONDS = 120  # until every rank has imported torch and found the model
PATIENCE_SECONDS = 5  # for a rank that ended to leave its word


def open_store(host: str, port: int, is_host: bool) -> dist.Store:
    """The host's store listens at this address and at no other. Port 0 is any free one; the store knows which.

    Raises InvalidParameter where the address is taken, or nobody answers there.
    """
    here = f"rank 0 meets the others at {host}:{port}"
    try:
        if not is_host:
            return dist.TCPStore(host, port, timeout=STORE_TIMEOUT)
        with socket.create_server((host, port)) as server:
            fd = os.dup(server.fileno())  # the store's own
            return dist.TCPStore(
                host, server.getsockname()[1], None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=fd
            )
    except OSError as error:
        raise InvalidParameter("MASTER_PORT", port, f"{here}: the address is taken ({error})") from error
    except RuntimeError as error:  # torch's word for whatever goes wrong between processes
        raise InvalidParameter("MASTER_PORT", port, f"{here}: nobody answers there") from error


class Meeting:
    """One engine's ranks. `processes` are those that this process has started, if it has."""

    def __init__(self, store: dist.Store, size: int, processes: RankProcesses | None = None) -> None:
        self.store = store
        self.size = size
        self.processes = processes or RankProcesses()

    def announce(self, rank: int) -> None:
        """This rank is there, and waits for the others."""
        self.store.set(f"ready/{rank}", b"")
        self.store.wait(["all ready"], timedelta(seconds=START_SECONDS))

    def wait_for_all(self) -> None:
        """Rank 0: until all the others have announced themselves. Raises RankFailed as soon as one never will."""
        deadline = time.monotonic() + START_SECONDS
        while missing := [rank for rank in range(1, self.size) if not self.store.check([f"ready/{rank}"])]:
            failure = self._first_failure()
            if failure is None and time.monotonic() > deadline:
                failure = RankFailed(missing[0], f"has not started within {START_SECONDS} seconds")
            if failure is not None:
                raise failure
            time.sleep(0.02)
        self.store.set("all ready", b"")

    def report(self, rank: int, error: BaseException) -> None:
        """Leave word of why this rank ends."""
        story = "".join(traceback.format_exception(error))
        word = {"time": time.time(), "is_consequence": isinstance(error, PeerLost), "story": story}
        with suppress(RuntimeError):  # rank 0, who would read it, may be gone, and the store with it
            self.store.set(f"failed/{rank}", json.dumps(word))

    def explain(self, loss: PeerLost) -> RankFailed:
        """Rank 0: who ended first, and why. A rank that only noticed that another one was gone is not the answer."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            failure = self._first_failure()
            if failure is not None:
                return failure
            time.sleep(0.02)
        silent = [rank for rank in range(1, self.size) if rank not in self._words()]
        if len(silent) == 1:
            return RankFailed(silent[0], f"has gone without a word ({loss})")
        return RankFailed(0, f"cannot reach the others ({loss})")

    def _first_failure(self) -> RankFailed | None:
        ended = self.processes.ended()  # asked before the words: whoever leaves one does so before it ends
        words = self._words()
        causes = {rank: word for rank, word in words.items() if not word["is_consequence"]}
        if causes:
            first = min(causes, key=lambda rank: causes[rank]["time"])
            return RankFailed(first, f"raised:\n{causes[first]['story']}")
        silent = [(rank, how) for rank, how in ended.items() if rank not in words]
        return RankFailed(*silent[0]) if silent else None

    def _words(self) -> dict[int, dict[str, Any]]:
        ranks = [rank for rank in range(1, self.size) if self.store.check([f"failed/{rank}"])]
        return {rank: json.loads(self.store.get(f"failed/{rank}")) for rank in ranks}
