"""One step on one screen: what it is, the pool, the block tables, the queues, and what happens in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from minipaged.show.contents import Contents, Words, contents_at
from minipaged.show.frame import Frame
from minipaged.show.pool_picture import draw_pool
from minipaged.show.queue_picture import draw_queues
from minipaged.show.table_picture import draw_tables
from minipaged.show.words import explain


def draw_step(frame: Frame, contents: Contents | None = None, words: Words | None = None) -> RenderableType:
    """Everything about one step, in 80 columns."""
    count = frame.plan.num_tokens
    title = f"step {frame.plan.step}: {count} token{'s' if count != 1 else ''} computed"
    return Group(
        Rule(Text(title, style="bold"), align="left", style="dim"),
        draw_plan(frame, words),
        Text(),
        draw_pool(frame.snapshot, frame.plan),
        Text(),
        draw_tables(frame.snapshot, contents, words),
        Text(),
        draw_queues(frame.snapshot),
    )


def draw_frame(frames: Sequence[Frame], index: int = -1, words: Words | None = None) -> RenderableType:
    """`draw_step` of one of several frames, with what the plans up to it have written into each slot."""
    return draw_step(frames[index], contents_at(frames, index), words)


def draw_plan(frame: Frame, words: Words | None = None) -> RenderableType:
    """The step in words, a line for each sentence."""
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    for sentence in explain(frame, words):
        lines.add_row("•", Text(sentence))
    return Padding(lines, (0, 0, 0, 1))
