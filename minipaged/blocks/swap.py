"""Swapping: a group's block tables move from the device's pool to the host's, and back (paper, section 4.5).

    device   A: 7 1 4     B: 7 1 9      blocks 7 and 1 have two references each
    host     A: 0 1 2     B: 0 1 3      four blocks move, not six, and the sharing is what it was

The two directions are one operation: every distinct block of the group goes into one block of the other pool, and the
tables are written anew. Blocks that others hold too are copied like the rest; they lose the group's references and
stay. On the way back the prefix cache may still have some of the content: those blocks are shared again and not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from minipaged.blocks.block_table import BlockTable
from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_sharing import NOTHING, Prefix


def distinct_blocks(seq_ids: Sequence[int], pool: BlockManager) -> list[int]:
    """Every block of these sequences, each once, in the order of the tables."""
    return list(dict.fromkeys(block for seq_id in seq_ids for block in pool.table(seq_id).physical_blocks))


def num_blocks_to_move(
    seq_ids: Sequence[int], source: BlockManager, target: BlockManager, known: Mapping[int, Prefix]
) -> int:
    """The free blocks of `target` that `move` takes. Exact."""
    adopted = _adopted(seq_ids, source, known)
    revived = sum(target.allocator.ref_count(block) == 0 for block in set(adopted.values()))
    return len(distinct_blocks(seq_ids, source)) - len(adopted) + revived


def move(
    seq_ids: Sequence[int], source: BlockManager, target: BlockManager, kind: str, known: Mapping[int, Prefix]
) -> list[tuple[int, int]]:
    """Move the tables of these sequences; returns the copies that make it true: (source block, target block).

    `known` holds, for some of the sequences, full blocks that the target has already. Raises OutOfBlocks and changes
    nothing where `num_blocks_to_move` is more than what is free. `kind` names the event (swap_out or swap_in).
    """
    target.allocator.require(num_blocks_to_move(seq_ids, source, target, known))
    placed = _adopted(seq_ids, source, known)
    for block in placed.values():  # held before new blocks are taken: these cannot be evicted any more
        target.allocator.share(block)
    moving = [block for block in distinct_blocks(seq_ids, source) if block not in placed]
    try:
        placed.update(zip(moving, target.allocator.allocate(len(moving)), strict=True))
    except BaseException:  # an eviction policy that raises
        _let_go(placed.values(), target)
        raise
    for seq_id in seq_ids:
        old = source.table(seq_id)
        physical = [placed[block] for block in old.physical_blocks]
        chain = list(known.get(seq_id, NOTHING).entries)
        target.share_all(
            seq_id, BlockTable.of(physical, old.num_filled, chain, target.block_size, target.versions), kind
        )
        source.note(kind, seq_id, old.physical_blocks)
        source.free(seq_id)
    _let_go(placed.values(), target)  # the tables hold them now
    return [(block, placed[block]) for block in moving]


def _let_go(blocks: Iterable[int], pool: BlockManager) -> None:
    for block in blocks:
        pool.allocator.free(block)


def _adopted(seq_ids: Sequence[int], source: BlockManager, known: Mapping[int, Prefix]) -> dict[int, int]:
    """Source block -> the target's block with the same content, for the known beginnings."""
    return {
        block: twin
        for seq_id in seq_ids
        for block, twin in zip(source.table(seq_id).physical_blocks, known.get(seq_id, NOTHING).blocks, strict=False)
    }
