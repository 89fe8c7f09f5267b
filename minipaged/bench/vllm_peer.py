"""vLLM as a peer: a process under another environment's Python, asked over its stdin to serve a workload.

Our environment and vLLM's need not agree on anything, not even on torch. While one side is measured the other waits on
a pipe. But first it must come to rest: when there is no more work, vLLM's workers go on looking for some for a second,
at full speed. Measured in that second, our prefill of 512 tokens took 1.2 s and not 0.2.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch

from minipaged.bench.workload import Workload, check_work, num_tokens_out
from minipaged.errors import InvalidParameter

SCRIPT = Path(__file__).with_name("vllm_process.py")
LAST_WORDS = 1500  # characters of its stderr that an error quotes
REST = 2.0  # seconds until nothing of it runs any more
PATIENCE = 30  # seconds to end by itself


@contextmanager
def vllm_peer(python: str, model: str | Path, dtype: torch.dtype, mode: str, max_model_len: int) -> Iterator[VLLMPeer]:
    """Load vLLM in a process that lasts as long as the `with` block; mode is "eager" or "compiled".

    Raises:
        InvalidParameter: there is no such Python, or vLLM does not come up in it; its last words are in the message.
    """
    options = {
        "model": str(model),
        "dtype": str(dtype).removeprefix("torch."),
        "enforce_eager": mode == "eager",
        "max_model_len": max_model_len,
    }
    with tempfile.TemporaryFile("w+", errors="replace") as stderr, _start(python, options, stderr) as process:
        try:
            yield VLLMPeer(python, process, stderr)
        finally:
            with suppress(OSError):  # it may be gone already
                process.stdin.close()  # the end of its stdin is the end of its work
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            with suppress(ProcessLookupError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)  # it, or the processes that it has started and left behind


class VLLMPeer:
    """The other end of vllm_process.py. Made when it has loaded its model."""

    def __init__(self, python: str, process: subprocess.Popen, stderr: TextIO) -> None:
        self.python = python
        self._process = process
        self._stderr = stderr
        self.version = self._answer()["version"]
        time.sleep(REST)

    def run(self, workload: Workload) -> float:
        """Seconds, as vLLM's own process measures them. It is at rest again when this returns."""
        with suppress(OSError):  # if it is gone, there is no answer either, and that is the better error
            self._process.stdin.write(json.dumps(workload) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        check_work(f"vLLM {self.version}", answer["tokens"], num_tokens_out(workload))
        time.sleep(REST)
        return answer["seconds"]

    def _answer(self) -> dict:
        line = self._process.stdout.readline() if self._speaks() else ""
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            last_words = self._stderr.read()[-LAST_WORDS:]
            raise InvalidParameter("peer", self.python, f"vLLM ended there:\n{last_words}")
        try:
            return json.loads(line)
        except ValueError as error:
            allowed = f"the Python of an environment with vLLM, and nothing else on its stdout. This one said {line!r}"
            raise InvalidParameter("peer", self.python, allowed) from error

    def _speaks(self) -> bool:
        """Wait until it does; False: it is gone. (A process that it has left behind may hold the pipe open.)"""
        while True:
            is_gone = self._process.poll() is not None
            if select.select([self._process.stdout], [], [], 0.0 if is_gone else 1.0)[0]:
                return True
            if is_gone:
                return False


def _start(python: str, options: dict, stderr: TextIO) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            [python, str(SCRIPT), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**_settings(), **os.environ},
            start_new_session=True,  # a group of its own, which can be ended as a whole
        )
    except OSError as error:
        allowed = f"hf, or the path of a Python that has vLLM ({error.strerror})"
        raise InvalidParameter("peer", python, allowed) from error


def _settings() -> dict[str, str]:
    """For vLLM's CPU build: every core of ours computes, none is kept back. The user's own environment goes first."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
