"""How an answer appears while it is made: as bare text, or over a live strip of the KV pool."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from minipaged.outputs import RequestOutput
from minipaged.show import draw_strip
from minipaged.snapshot import Snapshot


class Stream(Protocol):
    def show(self, output: RequestOutput, snapshot: Snapshot | None) -> None:
        """The answer so far, and the pool in the step that it came from."""
        ...

    def close(self) -> None:
        """Nothing more will come, whatever the reason. Again is no error."""
        ...


class PlainStream:
    """Prints what each step adds. Not through rich, which would expand tabs and turn :smile: into a picture."""

    def __init__(self, out: Console) -> None:
        self._file = out.file
        self._num_shown = 0

    def show(self, output: RequestOutput, snapshot: Snapshot | None) -> None:
        text = output.outputs[0].text
        print(text[self._num_shown :], end="\n" if output.finished else "", file=self._file, flush=True)
        self._num_shown = len(text)

    def close(self) -> None:
        pass


class WatchedStream:
    """Redraws answer and pool in every step. At the end the pool goes, and the answer stays as bare text."""

    def __init__(self, out: Console) -> None:
        self._file = out.file
        self._live = Live(console=out, transient=True, auto_refresh=False, vertical_overflow="visible")
        self._live.start()

    def show(self, output: RequestOutput, snapshot: Snapshot | None) -> None:
        text = output.outputs[0].text
        if output.finished:
            self.close()
            print(text, file=self._file, flush=True)
        elif snapshot is not None:
            self._live.update(Group(Text(text), Text(), draw_strip(snapshot)), refresh=True)

    def close(self) -> None:
        self._live.stop()
