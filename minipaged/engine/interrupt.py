"""Ctrl-C between steps: the first one sets a flag, honoured when the step is over. A second one does not wait for the
worker or a viewer; amid planning it does, for these milliseconds, or blocks would be lost. A third one raises at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interruptible:
    """`with` it around work that may break off anywhere without harm."""

    def __init__(self) -> None:
        self.is_now = False

    def __enter__(self) -> None:
        self.is_now = True

    def __exit__(self, *_: object) -> None:
        self.is_now = False


class InterruptFlag:
    """Whether Ctrl-C came."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def is_set(self) -> bool:
        return self.count > 0

    def check(self) -> None:
        """Raise the interrupt that waited, now that it does no harm."""
        if self.is_set:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt(interruptible: Interruptible) -> Iterator[InterruptFlag]:
    """While inside, Ctrl-C is deferred as told above. Outside the main thread Python has no say: nothing changes."""
    flag = InterruptFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def on_interrupt(signum, frame):
        flag.count += 1
        if flag.count > 2 or (flag.count == 2 and interruptible.is_now):
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)
