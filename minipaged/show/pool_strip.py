"""A pool with one character for each block: for pools of thousands, and for a line that is redrawn while text streams.

  0 AAAa··B2····~~~~          A, a    held by A: full, partial
 64 CCCCc···                  2       two references
128 … 1455: all free          ~       free, and kept for its content
"""

from __future__ import annotations

from rich.text import Text

from minipaged.show.labels import label
from minipaged.show.pool_state import BlockLook, Pool, device_pool
from minipaged.snapshot import Snapshot

STRIP_WIDTH = 64  # blocks in a line


def draw_strip(snapshot: Snapshot) -> Text:
    """The device pool with one character for each block, whatever its size: for a line that is redrawn."""
    return strips(device_pool(snapshot))


def strips(pool: Pool) -> Text:
    """64 blocks in a line; lines in which all is free are drawn together."""
    text, free_from = Text(), None
    for begin in range(0, len(pool.blocks), STRIP_WIDTH):
        line = pool.blocks[begin : begin + STRIP_WIDTH]
        if any(block.is_taken for block in line) or len(pool.blocks) <= STRIP_WIDTH:
            _end_free_lines(text, free_from, begin)
            free_from = None
            text.append(f"{begin:>6} ", style="dim")
            for block in line:
                text.append(_symbol(block, pool.block_size), style=block.style)
            text.append("\n")
        elif free_from is None:
            free_from = begin
    _end_free_lines(text, free_from, len(pool.blocks))
    text.rstrip()
    return text


def _end_free_lines(text: Text, free_from: int | None, end: int) -> None:
    if free_from is not None:
        text.append(f"{free_from:>6} ", style="dim").append(f"… {end - 1}: all free\n", style="dim")


def _symbol(block: BlockLook, block_size: int) -> str:
    """The holder's letter, small where the block is not full yet; the number of references where there are several."""
    if block.ref_count > 1:
        return str(block.ref_count) if block.ref_count < 10 else "+"
    if block.seq_ids:
        letter = label(block.seq_ids[0])[0]
        return letter if block.num_filled == block_size else letter.lower()
    return "#" if block.ref_count else "~" if block.is_cached else "·"
