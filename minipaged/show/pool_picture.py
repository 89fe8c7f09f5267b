"""The physical pool as a grid: who holds each block, how full it is, how many share it.

    ┌────────┬────────┬────────┬────────┐      0   free
    │0       │1*AB×2  │2 ~     │3 A     │      1   held by A and B: two references; written in this step
    │····    │▮▮▮▯    │▒▒▒▒    │▮▯▯▯    │      2   held by nobody, kept for its content (prefix cache)
    └────────┴────────┴────────┴────────┘      3   held by A; one of its four slots is filled

A pool of more than CELLS blocks is drawn with one character for each block instead (pool_strip.py).
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minipaged.show.labels import colour, label
from minipaged.show.pool_state import BlockLook, Pool, device_pool, host_pool
from minipaged.show.pool_strip import strips
from minipaged.snapshot import Snapshot
from minipaged.step import StepPlan

CELLS = 48  # a pool of so many blocks at most is drawn in cells
CELL_WIDTH = 8  # "12*AB…×5", or a bar
BAR_WIDTH = 8


def draw_pool(snapshot: Snapshot, plan: StepPlan | None = None) -> RenderableType:
    """The device pool and, where there is one, the host pool beside it. With the plan, what it writes is marked."""
    device = device_pool(snapshot, plan)
    if not snapshot.host_ref_counts:
        return Group(_draw(device, 8, "; "), _legend(device))
    host = host_pool(snapshot, plan)
    if len(device.blocks) > CELLS:
        unused = not any(block.is_taken for block in host.blocks)
        host_picture = Text(host.caption("; "), style="bold") if unused else _draw(host, 8, "; ")
        return Group(_draw(device, 8, "; "), host_picture, _legend(device, host))
    side_by_side = Table.grid(padding=(0, 1))
    for num_columns in (5, 3):
        side_by_side.add_column(width=num_columns * (CELL_WIDTH + 1) + 1)
    side_by_side.add_row(_draw(device, 5, "\n"), _draw(host, 3, "\n"))
    return Group(side_by_side, _legend(device, host))


def _draw(pool: Pool, num_columns: int, separator: str) -> RenderableType:
    """Cells for a small pool, and for any host pool: most of that is free, and left out."""
    large = len(pool.blocks) > CELLS and pool.name != "host"
    return Group(Text(pool.caption(separator), style="bold"), strips(pool) if large else _cells(pool, num_columns))


def _legend(*pools: Pool) -> Text:
    """What the symbols in these pools mean: only those that occur."""
    blocks = [block for pool in pools for block in pool.blocks]
    large = len(pools[0].blocks) > CELLS
    taken = "A full, a partial, · free" if large else "▮ filled slot  ▯ empty slot  · free"
    shared = "2 … 9, + references" if large else "×2 references"
    parts = [taken]
    parts += [shared] if any(block.ref_count > 1 for block in blocks) else []
    parts += ["~ cached"] if any(block.is_cached for block in blocks) else []
    parts += ["# pinned"] if any(block.ref_count and not block.seq_ids for block in blocks) else []
    parts += ["* written now"] if not large and any(block.is_written for block in blocks) else []
    return Text("  ".join(parts), style="dim")


def _cells(pool: Pool, num_columns: int) -> RenderableType:
    """Lines of cells. Of a pool too large for that, the lines in which all is free are left out, and counted."""
    num_rows = -(-len(pool.blocks) // num_columns)
    num_columns = -(-len(pool.blocks) // num_rows)  # twelve blocks are two lines of six
    rows = [pool.blocks[i : i + num_columns] for i in range(0, len(pool.blocks), num_columns)]
    shown = [row for row in rows if len(pool.blocks) <= CELLS or row is rows[0] or any(block.is_taken for block in row)]
    grid = Table(show_header=False, padding=(0, 0), show_lines=True, border_style="dim")
    for _ in rows[0]:
        grid.add_column(width=CELL_WIDTH, no_wrap=True)
    for row in shown:
        grid.add_row(*(_cell(block, pool.block_size) for block in row))
    hidden = sum(map(len, rows)) - sum(map(len, shown))
    return Group(grid, Text(f"and {hidden} more, all free", style="dim")) if hidden else grid


def _cell(block: BlockLook, block_size: int) -> Text:
    mark = "*" if block.is_written else " "
    references = f"×{block.ref_count}" if block.ref_count > 1 else ""
    number = f"{block.number}{mark}"
    owners = _owners(block, CELL_WIDTH - len(number) - len(references))
    head = Text(number, style="bold" if block.is_written else "").append_text(owners).append(references, style="bold")
    return head.append("\n").append_text(_bar(block, block_size))


def _owners(block: BlockLook, width: int) -> Text:
    """The letters of those who hold the block, as many as there is room for; … stands for the others."""
    if not block.seq_ids:
        return Text("#" if block.ref_count else "~" if block.is_cached else "", style=block.style)
    text = Text()
    for seq_id in block.seq_ids:
        if len(text) + len(label(seq_id)) > width - (seq_id != block.seq_ids[-1]):
            return text.append("…")
        text.append(label(seq_id), style=f"bold {colour(seq_id)}")
    return text


def _bar(block: BlockLook, block_size: int) -> Text:
    """The slots of a block, up to eight as they are, more of them drawn to scale."""
    width = min(block_size, BAR_WIDTH)
    if not block.ref_count:
        return Text(("▒" if block.is_cached else "·") * width, style="dim")
    filled = -(-block.num_filled * width // block_size)
    if filled == width and block.num_filled < block_size:
        filled -= 1  # a bar is full only where the block is
    return Text("▮" * filled + "▯" * (width - filled), style=block.style)
