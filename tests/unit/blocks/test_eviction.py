"""Which cached block goes, what becomes of those behind it, and policies that misbehave."""

from __future__ import annotations

import pytest

from minipaged.blocks.eviction import EvictFewestHits, EvictLeastRecentlyUsed
from minipaged.errors import InvariantBroken
from tests.unit.blocks.test_prefix_cache import Pool


def test_a_cached_block_counts_as_free_and_is_evicted_when_no_other_is_left():
    pool = Pool(num_blocks=4)
    pool.run(0, list(range(8)))
    pool.blocks.free(0)
    assert (pool.blocks.num_free, pool.blocks.allocator.cached) == (4, [0, 1])
    pool.blocks.drain_events()
    pool.run(1, [50] * 12)  # the two never used, and the tail of the cached chain
    assert pool.blocks.allocator.cached == [0]
    assert pool.blocks.drain_events() == (("evict", None, (1,)), ("allocate", 1, (2, 3, 1)))
    assert pool.blocks.table(1).physical_blocks == (2, 3, 1)
    pool.blocks.free(1)
    assert pool.run(2, list(range(9))) == 4


def test_an_evicted_block_is_found_no_more():
    """vLLM #4764: an evicted block that stays in the map gives foreign content to whoever asks for the old one."""
    pool = Pool(num_blocks=2)
    pool.run(0, list(range(8)))
    pool.blocks.free(0)
    pool.run(1, [50] * 8)
    pool.blocks.free(1)
    assert pool.run(2, list(range(8))) == 0


def test_the_oldest_chain_goes_first_and_its_tail_before_its_head():
    pool = Pool(num_blocks=4)
    pool.run(0, [1] * 8)
    pool.run(1, [2] * 8)
    pool.blocks.free(1)
    pool.blocks.free(0)
    order = [pool.blocks.allocator.evictable.evict() for _ in range(4)]
    assert order == [3, 2, 1, 0]


def test_another_policy_keeps_what_was_hit_most():
    pool = Pool(num_blocks=4, policy=EvictFewestHits())
    pool.run(0, [1] * 5)
    pool.blocks.free(0)
    for seq in (1, 2):
        assert pool.run(seq, [1] * 5) == 4
        pool.blocks.free(seq)
    pool.run(3, [2] * 5)
    pool.blocks.free(3)
    first = pool.blocks.allocator.evictable.evict()
    pool.blocks.allocator._cache.forget(first)
    assert first != pool.prefixes.find([1] * 4, "").blocks[0]
    assert isinstance(pool.blocks.allocator.evictable, EvictLeastRecentlyUsed)


def test_a_block_whose_content_is_void_was_not_hit():
    policy = EvictFewestHits()
    for block in (0, 1):
        policy.release(block)
    policy.reuse(0, is_hit=False)  # a reset, say: it comes back with other content
    policy.release(0)
    policy.reuse(1, is_hit=True)
    policy.release(1)
    assert policy.evict() == 0


class EvictHighest(EvictLeastRecentlyUsed):
    """Cares for no chain: the block with the highest number goes."""

    def evict(self):
        block = max(self._blocks)
        self.reuse(block, is_hit=False)
        return block


def test_a_block_whose_parent_was_evicted_makes_way_for_the_same_content_computed_anew():
    pool = Pool(num_blocks=4, policy=EvictHighest())
    pool.blocks.grow(9, 4)  # so that the parent gets a higher number than its child
    pool.blocks.grow(0, 4)
    pool.blocks.free(9)
    pool.blocks.allocator._free.rotate(1)
    pool.run(0, list(range(8)))
    parent, child = pool.blocks.table(0).physical_blocks
    assert parent > child
    pool.blocks.free(0)
    pool.run(1, [50] * 11)  # takes the two free blocks and one more
    assert (parent in pool.prefixes._cache, child in pool.prefixes._cache) == (False, True)
    pool.blocks.free(1)
    assert pool.run(2, list(range(8))) == 0
    pool.blocks.free(2)
    assert pool.run(3, list(range(9))) == 8


@pytest.mark.parametrize("block", [0, None, 2])
def test_a_policy_that_evicts_what_is_not_its_own_is_named(block):
    """Block 0 is in use, None is no block, and 2 stays in the policy."""

    class Wrong(EvictLeastRecentlyUsed):
        def evict(self):
            return block

        def __repr__(self):
            return "Wrong()"

    pool = Pool(num_blocks=3, policy=Wrong())
    pool.run(0, [1] * 8)
    pool.run(1, [2] * 4)
    pool.blocks.free(1)
    with pytest.raises(InvariantBroken, match=rf"Wrong\(\) evicts {block}"):
        pool.blocks.grow(2, 1)


def test_a_policy_that_raises_in_the_middle_loses_no_block():
    class Second(EvictLeastRecentlyUsed):
        def evict(self):
            if len(self) == 1:
                raise ZeroDivisionError
            return super().evict()

    pool = Pool(num_blocks=3, policy=Second())
    pool.run(0, [1] * 8)
    pool.blocks.free(0)
    with pytest.raises(ZeroDivisionError):
        pool.blocks.grow(1, 12)
    pool.blocks.free(1)
    pool.check()
    assert pool.blocks.num_free == 3
