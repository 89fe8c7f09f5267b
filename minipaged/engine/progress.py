"""The progress bar of long work: on stderr, on a terminal, and only after a moment."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minipaged.outputs import RequestOutput

PATIENCE = 1.0  # seconds; shorter work needs no bar


class GenerationProgress:
    """Counts finished requests and generated tokens of one call."""

    def __init__(self, num_requests: int, show: bool) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("generating", total=num_requests, rate=0.0)
        self._show = show and console.is_terminal
        self._start = time.perf_counter()
        self._tokens: dict[str, int] = {}

    def __enter__(self) -> GenerationProgress:
        return self

    def update(self, outputs: Iterable[RequestOutput]) -> None:
        """Count what one step returned; the bar appears only once the work has proved to be long."""
        if not self._show:
            return
        outputs = list(outputs)
        for output in outputs:
            self._tokens[output.request_id] = sum(len(answer.token_ids) for answer in output.outputs)
        elapsed = time.perf_counter() - self._start
        if elapsed > PATIENCE:
            self._bar.start()
        finished = sum(output.finished for output in outputs)
        self._bar.update(self._task, advance=finished, rate=sum(self._tokens.values()) / max(elapsed, 1e-9))

    def __exit__(self, *_: object) -> None:
        if self._show:
            self._bar.stop()
