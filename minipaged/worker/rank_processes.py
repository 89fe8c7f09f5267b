"""The processes that an engine starts for its other ranks, and that must never outlive it.

    python -m minipaged.worker.rank     one each; not multiprocessing, which would import the user's script again

A child ends when its standard input does, that is when this process ends, however it ends. Children have sessions of
their own: Ctrl-C at the terminal is for rank 0 alone, which decides.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGE_ROOT = Path(__file__).parents[2]
END_SECONDS = 5  # for a rank that was told to end


class RankProcesses:
    """Ranks 1, 2, … of one engine, as far as they were started here."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, start: Any) -> None:
        """Start one rank, and tell it all that it must know (`start`, pickled)."""
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONSAFEPATH": "1",  # nothing in the current directory may stand in a module's place
        }
        command = [sys.executable, "-m", "minipaged.worker.rank"]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, start_new_session=True
        )
        self._children[rank] = child
        with suppress(BrokenPipeError):  # it has ended already: `ended` will say how
            child.stdin.write(pickle.dumps(start))
            child.stdin.flush()

    def ended(self) -> dict[int, str]:
        """The ranks whose process is no more, and how it ended."""
        codes = {rank: child.poll() for rank, child in self._children.items()}
        return {rank: _how_it_ended(code) for rank, code in codes.items() if code is not None}

    def end(self, at_once: bool) -> None:
        """Afterwards none of them runs, whatever they do. `at_once` leaves no time to those that were told to end."""
        for child in self._children.values():
            if at_once:
                child.kill()
            with suppress(BrokenPipeError):
                child.stdin.close()
        deadline = time.monotonic() + END_SECONDS
        for child in self._children.values():
            try:
                child.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children.values()]


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}, without a word; its standard error may say more"
