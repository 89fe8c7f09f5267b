"""What takes long says so on stderr: stdout may be a pipe that carries answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total_bytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes the bytes done so far; with `shown` False it does nothing."""
    if not shown:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def progress_line(what: str) -> Iterator[None]:
    """Shows a terminal that something of unknown length goes on; the line is gone when it is over."""
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
