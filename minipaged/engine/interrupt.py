"""Ctrl-C between steps: the first one sets a flag, honoured when the step is over; the second one raises at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class InterruptFlag:
    """Whether Ctrl-C came."""

    def __init__(self) -> None:
        self.is_set = False

    def check(self) -> None:
        """Raise the interrupt that waited, now that it does no harm."""
        if self.is_set:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[InterruptFlag]:
    """While inside, the first Ctrl-C only sets the flag. Outside the main thread Python has no say: nothing changes."""
    flag = InterruptFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def on_interrupt(signum, frame):
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)
