"""Block tables, as in the paper's Figure 6: which physical block each logical block is, how full, and what is in it.

     A  mine        logical   physical   filled
                          0          7      4/4   │Four│ score│ and│ seven│
                          1          1      3/4   │ years│ ago│ our│·│

Where the tables together are too long for that, each becomes one line of physical block numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from minipaged.show.contents import Contents, Words, spell
from minipaged.show.frame import Tables
from minipaged.show.labels import colour, label, ranges
from minipaged.snapshot import LogicalBlock, Snapshot

MOST_ROWS = 20  # so many logical blocks are drawn one under another


def draw_tables(snapshot: Snapshot, contents: Contents | None = None, words: Words | None = None) -> RenderableType:
    """All block tables, those of swapped sequences too; with `contents` (and `words`), what stands in each slot."""
    names = {seq_id: request_id for request_id, seq_ids in snapshot.groups.items() for seq_id in seq_ids}
    if not snapshot.tables and not snapshot.host_tables:
        return Text("no sequence has blocks", style="dim")
    num_rows = sum(map(len, [*snapshot.tables.values(), *snapshot.host_tables.values()]))
    if num_rows > MOST_ROWS:
        return _lines(snapshot, names)
    picture = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in ("sequence", "logical", "physical", "filled"):
        picture.add_column(column, justify="left" if column == "sequence" else "right", no_wrap=True)
    picture.add_column("in its slots" if contents else "", overflow="fold")
    for tables, place in ((snapshot.tables, ""), (snapshot.host_tables, "host ")):
        pool = {} if contents is None else contents.host if place else contents.device
        for seq_id, table in tables.items():
            for logical, entry in enumerate(table):
                name = _name(seq_id, names) if logical == 0 else Text()
                filled = f"{entry.num_filled}/{snapshot.block_size}"
                slots = _slots(entry, pool, snapshot.block_size, words) if contents else Text()
                picture.add_row(name, str(logical), f"{place}{entry.physical_block}", filled, slots)
    return picture


def _name(seq_id: int, names: Mapping[int, str]) -> Text:
    """The letter, and the request it belongs to."""
    request = names.get(seq_id, "")
    short = request if len(request) <= 16 else request[:15] + "…"
    return Text(label(seq_id), style=f"bold {colour(seq_id)}").append(f" {short}", style="not bold dim")


def _slots(entry: LogicalBlock, pool: Mapping[int, list[int | None]], block_size: int, words: Words | None) -> Text:
    tokens = pool.get(entry.physical_block, [None] * block_size)[: entry.num_filled]
    empty = min(4, block_size - entry.num_filled)  # a hint is enough: the exact number stands beside
    return Text("│" + "".join(f"{spell(token, words)}│" for token in tokens) + "·│" * empty)


def _lines(snapshot: Snapshot, names: Mapping[int, str]) -> RenderableType:
    picture = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    picture.add_column("sequence", no_wrap=True)
    picture.add_column("physical blocks, in logical order", overflow="fold")
    picture.add_column("last one", justify="right", no_wrap=True)
    for tables, place in ((snapshot.tables, ""), (snapshot.host_tables, "host: ")):
        _add_lines(picture, tables, place, names, snapshot.block_size)
    return picture


def _add_lines(picture: Table, tables: Tables, place: str, names: Mapping[int, str], block_size: int) -> None:
    for seq_id, table in tables.items():
        blocks = place + ranges(block for block, _ in table)
        picture.add_row(_name(seq_id, names), blocks, f"{table[-1].num_filled}/{block_size}" if table else "")
