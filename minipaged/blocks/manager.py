"""The KV cache manager: a block table for each sequence over one pool of blocks (paper, sections 4.2 to 4.5).

Everything that a decoding algorithm does to memory is one of three calls (section 5.2): `grow` a sequence by some
tokens, `fork` it, `free` it. `num_blocks_needed` tells beforehand, exactly, what growing will take.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from minipaged.blocks.allocator import BlockAllocator
from minipaged.blocks.block_table import BlockTable, blocks_for
from minipaged.blocks.copy_on_write import copy_on_write, writes_to_shared_block
from minipaged.blocks.eviction import EvictionPolicy
from minipaged.blocks.prefix_cache import PrefixCache
from minipaged.errors import UnknownSequence
from minipaged.snapshot import BlockEvent


class BlockManager:
    """Maps sequences to physical blocks. `free_order` sets the free list at the start (tests shuffle it).

    With `cache`, known blocks outlive their sequences, and `eviction_policy` says which goes first (prefix_sharing.py).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        free_order: Iterable[int] | None = None,
        cache: PrefixCache | None = None,
        eviction_policy: EvictionPolicy | None = None,
        pool: str = "device",
    ) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks, pool, free_order, cache, eviction_policy, self._note_eviction)
        self.versions = itertools.count()  # of block tables
        self.pinned: list[int] = []  # blocks held for no sequence, once for each pin
        self.events: list[BlockEvent] = []  # since `drain_events` was last called
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def table(self, seq_id: int) -> BlockTable:
        try:
            return self._tables[seq_id]
        except KeyError:
            raise UnknownSequence(f"sequence {seq_id} has no block table") from None

    def tables(self) -> dict[int, BlockTable]:
        """The table of every sequence that has one, by sequence number."""
        return dict(self._tables)

    def num_held(self, seq_id: int) -> int:
        """How many logical blocks the sequence has; 0 where it has no table."""
        table = self._tables.get(seq_id)
        return 0 if table is None else len(table)

    def num_blocks_needed(self, growth: Iterable[tuple[int, int]]) -> int:
        """The free blocks that `grow(seq_id, num_tokens)` for every pair of `growth` takes, all together. Exact.

        When all k sharers of a partial block write, the last one finds itself alone: k - 1 copies, not k.
        """
        needed = 0
        writers: Counter[int] = Counter()  # of each shared partial block
        for seq_id, num_tokens in growth:
            table = self._tables.get(seq_id)
            if table is None:
                needed += blocks_for(num_tokens, self.block_size)
                continue
            needed += max(0, blocks_for(num_tokens, self.block_size) - len(table))
            if writes_to_shared_block(table, num_tokens, self.allocator):
                writers[table[-1]] += 1
        for block, count in writers.items():
            needed += min(count, self.allocator.ref_count(block) - 1)
        return needed

    def grow(self, seq_id: int, num_tokens: int) -> list[tuple[int, int]]:
        """Give the sequence slots for its first `num_tokens` tokens. Returns the block copies that must come first.

        New blocks are taken only where the last one is full. Raises OutOfBlocks and changes nothing where
        `num_blocks_needed` is more than what is free.
        """
        table = self._tables.get(seq_id)
        if table is None:
            table = BlockTable(self.block_size, self.versions)
        missing = max(0, blocks_for(num_tokens, self.block_size) - len(table))
        shared = writes_to_shared_block(table, num_tokens, self.allocator)
        self.allocator.require(missing + shared)
        self._tables[seq_id] = table
        copies = []
        if shared:
            copies.append(copy_on_write(table, self.allocator))
            self.note("copy", seq_id, copies[0])
        if missing:
            table.append(blocks := self.allocator.allocate(missing))
            self.note("allocate", seq_id, tuple(blocks))
        table.fill(max(num_tokens, table.num_filled))
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child shares every block of the parent: one more reference each, and no new block."""
        self.share_all(child_id, self.table(parent_id).fork(), "fork")

    def share_prefix(self, parent_id: int, child_id: int, num_blocks: int) -> None:
        """A new table for the child: the first blocks of the parent, all of them full."""
        self.share_all(child_id, self.table(parent_id).fork(num_blocks), "fork")

    def free(self, seq_id: int) -> None:
        """Drop the sequence's table; blocks that nobody else names are free again. No table is no error."""
        table = self._tables.pop(seq_id, None)
        if table is not None:
            # The tail first: a cached block is of no use without those before it, so it may be evicted before them.
            freed = tuple(block for block in reversed(table.physical_blocks) if self.allocator.free(block))
            self.note("free", seq_id, freed)

    def drain_events(self) -> tuple[BlockEvent, ...]:
        """What has happened since the last call, in order."""
        events, self.events = tuple(self.events), []
        return events

    def share_all(self, seq_id: int, table: BlockTable, kind: str) -> None:
        """Give the sequence a table whose blocks others have filled; `kind` names the event (fork, hit or swap_in)."""
        self._tables[seq_id] = table
        for block in table.physical_blocks:
            self.allocator.share(block)
        self.note(kind, seq_id, table.physical_blocks)

    def note(self, kind: str, seq_id: int | None, blocks: tuple[int, ...]) -> None:
        """Tell viewers. What happens in the host pool they hear from the device's side: swap_out and swap_in."""
        if self.allocator.pool == "device":
            self.events.append(BlockEvent(kind, seq_id, blocks))

    def _note_eviction(self, block: int) -> None:
        self.note("evict", None, (block,))

    def check(self) -> None:
        """The conservation law over the pool and all tables."""
        for table in self._tables.values():
            table.check()
        named = [block for table in self._tables.values() for block in table.physical_blocks]
        self.allocator.check(named + self.pinned)
