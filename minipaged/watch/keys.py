"""What the viewer wants next: single keys on a terminal, lines from a pipe, and a clock with `--auto`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

NEXT, BACK, RUN, QUIT = "next", "back", "run on", "quit"
COMMANDS = {"": NEXT, "n": NEXT, "b": BACK, "r": RUN, "q": QUIT}
CTRL_D = "\x04"
HELP = "Enter next · b back · r run on · q quit"

ReadCommand = Callable[[], str]


def command_of(text: str) -> str | None:
    """What a key or a line means; None where it means nothing. Enter and the space bar are an empty line."""
    return COMMANDS.get(text.strip().lower())


def from_lines(stream: TextIO) -> ReadCommand:
    """A line for each command. When there are no more of them, the rest runs on."""

    def read() -> str:
        while line := stream.readline():
            if (command := command_of(line)) is not None:
                return command
        return RUN

    return read


def from_clock(seconds: float) -> ReadCommand:
    """The next step, every so many seconds."""

    def read() -> str:
        time.sleep(seconds)
        return NEXT

    return read


def from_keys() -> ReadCommand:
    """Single keys of the terminal; lines where Python cannot read keys there."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        return from_lines(sys.stdin)

    def read_key() -> str:
        """One key, without waiting for Enter and without showing it. What was typed ahead is not lost."""
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        try:
            tty.setcbreak(descriptor, termios.TCSADRAIN)
            return os.read(descriptor, 1).decode(errors="replace")
        finally:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def read() -> str:
        while (key := read_key()) not in ("", CTRL_D):  # or the terminal has gone
            if (command := command_of(key)) is not None:
                return command
        return QUIT

    return read
