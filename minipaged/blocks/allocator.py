"""The allocator: one pool of physical blocks, a free list, a reference count for each block (paper, sections 4.3, 4.4).

    block        0    1    2    3    4    5
    ref_count    1    0    3    0    0    1          free list (next one first): 1  3  4

A block is on the free list (count 0), or named by as many block tables as its count says. With a prefix cache there
is a third way to be: nobody names the block, but its content is known and may be asked for again. Such a block counts
as free; an eviction policy says which of them goes when the free list is empty. There is one allocator for each pool
(device, host).

The same operations give the same block numbers, in every process: several ranks and a replayed trace depend on it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from minipaged.blocks.eviction import EvictionPolicy, EvictLeastRecentlyUsed
from minipaged.blocks.prefix_cache import PrefixCache
from minipaged.errors import DoubleFree, InvalidParameter, InvariantBroken, OutOfBlocks


class BlockAllocator:
    """Hands out the blocks 0 … num_blocks - 1. `free_order` is the free list at the start (tests shuffle it).

    With `cache`, blocks that it knows are kept by `policy` (None: least recently used first) when nobody names them;
    `on_evict` hears of each one that goes.
    """

    def __init__(
        self,
        num_blocks: int,
        pool: str = "device",
        free_order: Iterable[int] | None = None,
        cache: PrefixCache | None = None,
        policy: EvictionPolicy | None = None,
        on_evict: Callable[[int], None] = lambda block: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.pool = pool
        self.evictable = EvictLeastRecentlyUsed() if policy is None else policy  # an empty one is false
        self._cache = cache
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks) if free_order is None else free_order)
        if sorted(self._free) != list(range(num_blocks)):
            raise InvalidParameter("free_order", list(self._free), f"each of the {num_blocks} block numbers once")

    @property
    def num_free(self) -> int:
        """Blocks that can be had: those on the free list, and those that are only kept for their content."""
        return len(self._free) + len(self.evictable)

    @property
    def ref_counts(self) -> tuple[int, ...]:
        """The reference count of every block, by block number."""
        return tuple(self._ref_counts)

    @property
    def cached(self) -> list[int]:
        """The free blocks that are kept for their content."""
        return [block for block in range(self.num_blocks) if block in self.evictable]

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` free blocks, each with one reference: all of them, or (OutOfBlocks) none."""
        self.require(count)
        while len(self._free) < count:  # before any is taken: a policy may raise
            self._free.append(self._evict())
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def require(self, count: int) -> None:
        """Raise OutOfBlocks unless that many blocks are free."""
        if count > self.num_free:
            raise OutOfBlocks(
                f"{count} blocks asked for, {self.num_free} of the {self.num_blocks} {self.pool} blocks are free"
            )

    def share(self, block: int) -> None:
        """One more table names this block; the first one, where it was only kept for its content."""
        if block in self.evictable:
            self.evictable.reuse(block, is_hit=True)
        elif self._ref_counts[block] == 0:
            raise DoubleFree(f"{self.pool} block {block} is free, so nothing can share it")
        self._ref_counts[block] += 1

    def free(self, block: int) -> bool:
        """One table less names this block. True where that was the last one and the block is free again."""
        if self._ref_counts[block] == 0:
            raise DoubleFree(f"{self.pool} block {block} is free already")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] > 0:
            return False
        if self._cache is not None and block in self._cache:
            self.evictable.release(block)
        else:
            self._free.append(block)
        return True

    def forget(self, block: int) -> None:
        """Its content is void: nobody can ask for it any more."""
        self._cache.forget(block)
        if block in self.evictable:
            self.evictable.reuse(block, is_hit=False)
            self._free.append(block)

    def _evict(self) -> int:
        block = self.evictable.evict()
        if block in self.evictable or block not in self._cache or self._ref_counts[block] > 0:
            raise InvariantBroken(f"{self.evictable!r} evicts {block!r}, which it holds still, or never held")
        self._cache.forget(block)
        self._on_evict(block)
        return block

    def check(self, references: Iterable[int]) -> None:
        """The conservation law. `references` lists every block-table entry that names a block of this pool."""
        counted = Counter(references)
        for block, count in enumerate(self._ref_counts):
            if count != counted[block]:
                raise InvariantBroken(
                    f"{self.pool} block {block}: reference count {count} != {counted[block]} entries that name it"
                )
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantBroken(f"{self.pool}: {len(self._free)} entries on the free list != {len(free)} distinct")
        referenced = {block for block, count in enumerate(self._ref_counts) if count > 0}
        cached = set(self.cached)
        kinds = len(free) + len(cached) + len(referenced)
        if len(free | cached | referenced) != self.num_blocks or kinds != self.num_blocks:
            raise InvariantBroken(
                f"{self.pool}: free {len(free)} + cached {len(cached)} + referenced {len(referenced)} "
                f"!= all {self.num_blocks}, or some block is two of these"
            )
        known = set() if self._cache is None else set(self._cache.blocks())
        if not cached <= known or free & known:
            raise InvariantBroken(
                f"{self.pool}: cached {sorted(cached)} and known {sorted(known)} contradict each other"
            )
