"""The scheduler's queues: who waits, who runs, who is swapped out, and who was preempted in this step."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from minipaged.show.labels import colour, label
from minipaged.snapshot import Snapshot


def draw_queues(snapshot: Snapshot) -> RenderableType:
    """Requests with the letters of their sequences, first come first. Empty queues but `running` are left out."""
    picture = Table.grid(padding=(0, 2, 0, 0))
    picture.add_column(style="bold", no_wrap=True)
    picture.add_column(overflow="fold")
    for name in ("waiting", "running", "swapped", "preempted"):
        requests = getattr(snapshot, name)
        if requests or name == "running":
            picture.add_row(name, _requests(snapshot, requests))
    return picture


def _requests(snapshot: Snapshot, requests: tuple[str, ...]) -> Text:
    text = Text()
    for request_id in requests:
        text.append(f"{'  ' if text else ''}{request_id} (")
        for i, seq_id in enumerate(snapshot.groups.get(request_id, ())):
            text.append(" " if i else "").append(label(seq_id), style=f"bold {colour(seq_id)}")
        text.append(")")
    return text if text else Text("nobody", style="dim")
