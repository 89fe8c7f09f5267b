"""The chat over three ranks: started by torchrun, where input is a pipe, and starting its own at a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_model

ROOT = Path(__file__).parents[3]
ANSWER = "The capital of France is Paris."


def children_of(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:  # it has just ended
            continue
    return [child for child, parent in parents.items() if parent == pid]


def test_torchrun_starts_the_ranks_and_one_of_them_talks():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command += ["--standalone", "-m", "minipaged.chat", "--temperature", "0", "--max-tokens", "20"]
    lines = b"What is the capital of France?\n/stats\n/quit\n"
    done = subprocess.run(command, input=lines, capture_output=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == ANSWER + "\n"
    assert b"on each of 3 ranks" in done.stderr
    assert done.stderr.count(b"KV blocks in use 3 of") == 1
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes as Linux shows them")
@pytest.mark.parametrize("end", ["/quit", pytest.param("a rank is killed", marks=pytest.mark.slow)])
def test_at_a_terminal_the_chat_starts_its_ranks_and_takes_them_along(end):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "minipaged.chat", "--temperature", "0", "--tensor-parallel-size", "3"]
    chat = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True)
    os.close(theirs)
    screen = Screen(ours)
    try:
        screen.wait_for("/help lists the commands")
        ranks = children_of(chat.pid)
        assert len(ranks) == 2
        screen.type("What is the capital of France?\n")
        screen.wait_for(ANSWER)
        if end == "/quit":
            screen.type("/quit\n")
        else:
            os.kill(ranks[0], signal.SIGKILL)
            screen.type("And of Spain?\n")
            screen.wait_for("the chat is over: rank ")
            screen.wait_for("was killed by SIGKILL")
        assert chat.wait(timeout=30) == (0 if end == "/quit" else 1)
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Screen:
    """The other end of a terminal."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.text:
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"never seen: {text!r} in {self.text!r}"
            self.text += os.read(self.fd, 4096).decode(errors="replace")
