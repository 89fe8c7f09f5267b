"""Copy-on-write: a write never reaches a block that another sequence reads (paper, section 4.4, Figure 8).

Two samples A and B share a prompt that ends in the middle of physical block 1. A writes first:

    before                       after A's write                  after B's write
    A: 7 1                       A: 7 3    copy 1 -> 3            A: 7 3
    B: 7 1    block 1: ref 2     B: 7 1    block 1: ref 1         B: 7 1    B is alone: it writes in place

So k sharers of a partial block make k - 1 copies. A full block is never written again, so it is shared without any
copy.
"""

from __future__ import annotations

from minipaged.blocks.allocator import BlockAllocator
from minipaged.blocks.block_table import BlockTable


def writes_to_shared_block(table: BlockTable, num_tokens: int, allocator: BlockAllocator) -> bool:
    """Whether growing to `num_tokens` would write into a block that other tables name too."""
    return num_tokens > table.num_filled and table.last_block_is_partial and allocator.ref_count(table[-1]) > 1


def copy_on_write(table: BlockTable, allocator: BlockAllocator) -> tuple[int, int]:
    """Give the table a last block of its own. Returns the copy to make: (source block, destination block).

    The new block *replaces* the entry, and the old one loses one reference; its other readers keep it as it is.
    """
    [new] = allocator.allocate()
    old = table.replace_last(new)
    allocator.free(old)
    return old, new
