"""Tables that move from one pool into the other: every distinct block once, and the sharing is what it was."""

from __future__ import annotations

import pytest

from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_cache import PrefixCache
from minipaged.blocks.prefix_sharing import PrefixSharing
from minipaged.blocks.swap import move, num_blocks_to_move
from minipaged.errors import OutOfBlocks


def pools(num_blocks=8, num_host_blocks=8, free_order=None, cache=None):
    return BlockManager(num_blocks, 4, free_order, cache), BlockManager(num_host_blocks, 4, pool="host")


def check(*managers):
    for manager in managers:
        manager.check()


def test_shared_blocks_move_once_and_are_shared_on_the_other_side():
    """The picture of swap.py: A in 7 1 4 and B in 7 1 9."""
    device, host = pools(10, free_order=[7, 1, 4, 9, 0, 2, 3, 5, 6, 8])
    device.grow(0, 8)
    device.fork(0, 1)
    device.grow(0, 11)
    device.grow(1, 10)
    assert move([0, 1], device, host, "swap_out", {}) == [(7, 0), (1, 1), (4, 2), (9, 3)]
    assert host.table(0).physical_blocks == (0, 1, 2)
    assert host.table(1).physical_blocks == (0, 1, 3)
    assert host.allocator.ref_counts == (2, 2, 1, 1, 0, 0, 0, 0)
    assert [entry.num_filled for entry in host.table(1).entries()] == [4, 4, 2]
    assert device.num_free == 10
    assert 0 not in device
    check(device, host)


def test_out_and_in_again_is_the_same_but_for_block_numbers():
    device, host = pools()
    device.grow(0, 7)
    device.fork(0, 1)
    move([0, 1], device, host, "swap_out", {})
    pairs = move([0, 1], host, device, "swap_in", {})
    assert device.table(0).physical_blocks == device.table(1).physical_blocks == tuple(b for _, b in pairs)
    assert device.allocator.ref_count(device.table(0)[1]) == 2
    assert device.grow(0, 8) == [(device.table(1)[1], device.table(0)[1])]  # the partial block is still shared
    assert host.num_free == 8
    check(device, host)


def test_a_block_that_an_outsider_holds_is_copied_out_and_stays():
    device, host = pools()
    device.grow(0, 8)
    device.fork(0, 1)
    move([0], device, host, "swap_out", {})
    assert device.table(1).physical_blocks == (0, 1)
    assert device.allocator.ref_counts[:2] == (1, 1)
    assert host.table(0).physical_blocks == (0, 1)
    check(device, host)


def test_where_the_other_pool_has_no_room_nothing_changes():
    device, host = pools(num_host_blocks=1)
    device.grow(0, 8)
    before = device.table(0).physical_blocks
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of the 1 host blocks are free"):
        move([0], device, host, "swap_out", {})
    assert device.table(0).physical_blocks == before
    assert host.num_free == 1
    check(device, host)


def test_every_new_table_has_a_version_of_its_own():
    """A worker that caches rows by version must not take a swapped-in table for the one before."""
    device, host = pools(free_order=[3, 2, 1, 0, 4, 5, 6, 7])
    device.grow(0, 8)
    before = device.table(0).version
    move([0], device, host, "swap_out", {})
    device.grow(1, 4)
    move([0], host, device, "swap_in", {})
    assert device.table(0).version not in (before, device.table(1).version)


class TestWithAPrefixCache:
    TOKENS = tuple(range(10))

    def start(self, num_blocks=4):
        cache = PrefixCache(4)
        self.device, self.host = pools(num_blocks, cache=cache)
        self.prefixes = PrefixSharing(self.device, cache)
        self.device.grow(0, 10)
        self.prefixes.note_full_blocks(0, lambda a, b: self.TOKENS[a:b], "")
        move([0], self.device, self.host, "swap_out", {})

    def come_back(self):
        known = {0: self.prefixes.find(self.TOKENS, "")}
        needed = num_blocks_to_move([0], self.host, self.device, known)
        free = self.device.num_free
        pairs = move([0], self.host, self.device, "swap_in", known)
        assert free - self.device.num_free == needed
        check(self.device, self.host)
        return pairs

    def test_what_the_cache_still_has_is_shared_again_and_not_copied(self):
        self.start()
        assert self.come_back() == [(2, 3)]
        assert self.device.table(0).physical_blocks == (0, 1, 3)

    def test_what_was_evicted_meanwhile_is_copied(self):
        self.start()
        self.device.grow(1, 16)  # everything
        self.device.free(1)
        assert len(self.come_back()) == 3

    def test_a_known_block_is_held_before_a_new_one_could_evict_it(self):
        self.start(num_blocks=5)
        self.device.grow(1, 8)  # another chain, released later: block 1 would be the first to be evicted
        self.prefixes.note_full_blocks(1, lambda a, b: tuple(range(50 + a, 50 + b)), "")
        self.device.free(1)
        self.device.grow(2, 4)
        assert self.device.allocator.cached == [0, 1, 3, 4]
        assert self.come_back() == [(2, 4)]
        assert self.device.table(0).physical_blocks == (0, 1, 4)

    def test_its_full_blocks_become_known_again(self):
        self.start()
        self.prefixes.reset()
        self.come_back()
        assert self.prefixes.note_full_blocks(0, lambda a, b: self.TOKENS[a:b], "") == list(self.device.table(0))[:2]
