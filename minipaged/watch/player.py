"""Shows frames one after another, forwards and backwards. Frames come from a run, or from a recording."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from minipaged.show import Frame, Recorder
from minipaged.watch.keys import BACK, HELP, QUIT, RUN, ReadCommand


class Player:
    """`advance` makes one more frame in the recorder, or says (False) that there is none.

    With somebody at the keys of a terminal (`is_live`) the end waits for a word. `clears` gives each frame the whole
    screen; otherwise they follow each other.
    """

    def __init__(
        self,
        recorder: Recorder,
        advance: Callable[[], bool],
        console: Console,
        read_command: ReadCommand,
        heading: str,
        is_live: bool = False,
        clears: bool = False,
    ) -> None:
        self._recorder = recorder
        self._advance = advance
        self._console = console
        self._read_command = read_command
        self._heading = heading
        self._is_live = is_live
        self._clears = clears
        self._runs_on = False

    def play(self) -> None:
        """Until the last frame, or until the viewer has seen enough."""
        index = 0
        while self._reach(index):
            self._show(index)
            index = self._choose(index)
            if index is None:
                return
        self._console.print(summary(self._recorder.frames), style="bold")

    def _reach(self, index: int) -> bool:
        """Make sure that there is a frame of that number."""
        while len(self._recorder.frames) <= index:
            if not self._advance():
                return False
        return True

    def _choose(self, index: int) -> int | None:
        """The frame to show next; None ends."""
        if self._runs_on and (not self._is_live or self._reach(index + 1)):
            return index + 1
        self._runs_on = False
        if self._is_live:
            place = "" if self._reach(index + 1) else "the end · "
            self._console.print(Text(f"\n{place}{HELP}", style="dim"))
        command = self._read_command()
        self._runs_on = command == RUN
        if command == QUIT:
            return None
        return max(0, index - 1) if command == BACK else index + 1

    def _show(self, index: int) -> None:
        if self._clears:
            self._console.clear()
        if self._clears or index == 0:
            self._console.print(Text(f"{self._heading}\n", style="italic"))
        self._console.print(self._recorder.draw(index))
        if not self._clears:
            self._console.print()


def summary(frames: list[Frame]) -> str:
    """What a run was like as a whole."""
    steps = [frame for frame in frames if frame.plan.work]
    if not steps:
        return "nothing ran"
    most = max(len(frame.plan.work) for frame in steps)
    computed = sum(frame.plan.num_tokens for frame in steps)
    copies = sum(len(frame.plan.copies) for frame in steps)
    preempted = sum(len(frame.snapshot.preempted) for frame in steps)
    taken = sum(frame.snapshot.num_used_blocks * frame.snapshot.block_size for frame in steps)
    filled = sum(frame.snapshot.num_filled for frame in steps)
    parts = [f"{len(steps)} steps", f"{computed} tokens computed", f"at most {most} sequence{'s' * (most > 1)} at once"]
    parts += [f"{copies} block {'copies' if copies > 1 else 'copy'}"] if copies else []
    parts += [f"{preempted} preemption{'s' * (preempted > 1)}"] if preempted else []
    return f"{', '.join(parts)}; of the slots in blocks in use, {filled / max(1, taken):.0%} were filled"
