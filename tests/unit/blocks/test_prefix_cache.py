"""Full blocks by content: chains, verified hits, salts, eviction, pins. Block size 4."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minipaged.blocks import prefix_cache
from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_cache import PrefixCache, block_key
from minipaged.blocks.prefix_sharing import PrefixSharing
from minipaged.errors import InvariantBroken


class Pool:
    """A manager with a prefix cache, and the two calls by which a scheduler uses it."""

    def __init__(self, num_blocks=8, policy=None):
        cache = PrefixCache(4)
        self.blocks = BlockManager(num_blocks, 4, cache=cache, eviction_policy=policy)
        self.prefixes = PrefixSharing(self.blocks, cache)

    def run(self, seq_id, tokens, salt=""):
        """Feed a whole sequence; returns how many of its tokens came from the cache."""
        prefix = self.prefixes.find(tokens[:-1], salt)
        if prefix.blocks:
            self.prefixes.begin_with(seq_id, prefix)
        self.blocks.grow(seq_id, len(tokens))
        self.prefixes.note_full_blocks(seq_id, lambda start, stop: tuple(tokens[start:stop]), salt)
        self.check()
        return 4 * len(prefix.blocks)

    def check(self):
        self.blocks.check()
        self.prefixes.check()


def test_a_second_sequence_begins_with_the_first_one_s_full_blocks():
    pool = Pool()
    assert pool.run(0, list(range(10))) == 0
    assert pool.run(1, [*range(9), 99]) == 8
    assert pool.blocks.table(0).physical_blocks[:2] == pool.blocks.table(1).physical_blocks[:2]
    assert [pool.blocks.allocator.ref_count(block) for block in pool.blocks.table(0).physical_blocks] == [2, 2, 1]


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_same_prompt_again_hits_whole_blocks_and_leaves_a_token_to_compute(length, cached):
    pool = Pool()
    pool.run(0, list(range(length)))
    pool.blocks.free(0)
    assert pool.run(1, list(range(length))) == cached


def test_equal_tokens_behind_another_beginning_are_no_hit():
    pool = Pool()
    pool.run(0, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert pool.run(1, [9, 9, 9, 9, 5, 6, 7, 8, 0]) == 0


def test_another_salt_never_shares():
    pool = Pool()
    pool.run(0, list(range(9)), salt="yours")
    assert pool.run(1, list(range(9)), salt="mine") == 0
    assert pool.run(2, list(range(9)), salt="yours") == 8


def test_a_forced_collision_is_a_miss_and_not_somebody_else_s_content(monkeypatch):
    monkeypatch.setattr(prefix_cache, "block_key", lambda parent_key, token_ids: b"the same")
    pool = Pool(16)
    pool.run(0, [1, 2, 3, 4, 0])
    assert pool.run(1, [5, 6, 7, 8, 0]) == 0  # other tokens behind the same root
    assert pool.run(2, [1, 2, 3, 4, 1, 2, 3, 4, 0]) == 4  # the same tokens, but the second time behind another parent
    assert pool.run(3, [1, 2, 3, 4, 0]) == 4


def test_keys_are_equal_in_every_process():
    code = "from minipaged.blocks.prefix_cache import block_key; print(block_key(b'x', [1, 2, 3]).hex())"
    printed = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert printed == [block_key(b"x", [1, 2, 3]).hex()] * 2


def test_hits_that_nobody_references_use_up_what_counts_as_free():
    pool = Pool()
    pool.run(0, list(range(9)))
    assert pool.prefixes.find(list(range(8)), "").num_revived == 0
    pool.blocks.free(0)
    assert pool.prefixes.find(list(range(8)), "").num_revived == 2


def test_what_two_sequences_compute_at_the_same_time_is_known_once():
    pool = Pool()
    for seq in (0, 1):
        pool.blocks.grow(seq, 4)
    for seq in (0, 1):
        pool.prefixes.note_full_blocks(seq, lambda start, stop: (7, 7, 7, 7), "")
    pool.check()
    pool.blocks.free(1)
    assert pool.blocks.allocator.cached == []
    pool.blocks.free(0)
    assert pool.blocks.allocator.cached == [0]


def test_a_withdrawn_block_is_free_and_unknown():
    pool = Pool()
    pool.run(0, list(range(8)))
    pool.blocks.free(0)
    pool.prefixes.withdraw([0, 1])
    pool.check()
    assert pool.blocks.allocator.cached == []
    assert pool.run(1, list(range(8))) == 0


def test_reset_forgets_everything_and_running_sequences_keep_their_blocks():
    pool = Pool()
    pool.run(0, list(range(8)))
    pool.run(1, [50] * 8)
    pool.blocks.free(0)
    pool.prefixes.reset()
    pool.check()
    assert pool.blocks.num_free == 6
    assert pool.run(2, [50] * 8) == 0
    pool.blocks.free(1)
    pool.check()


def test_a_pin_holds_a_beginning_until_it_is_released():
    pool = Pool(num_blocks=4)
    pool.run(0, list(range(8)))
    pinned = pool.prefixes.pin(list(range(8)), "")
    pool.blocks.free(0)
    pool.check()
    assert (pinned, pool.blocks.num_free) == ((0, 1), 2)
    pool.run(1, [50] * 8)
    pool.blocks.free(1)
    assert pool.run(2, list(range(9))) == 8
    pool.blocks.free(2)
    pool.prefixes.unpin(pinned)
    pool.check()
    assert pool.blocks.num_free == 4


def test_a_reset_in_mid_answer_keeps_nobody_from_caching_the_same_tokens_later():
    pool = Pool(num_blocks=12)
    pool.run(0, list(range(5)))
    pool.prefixes.reset()
    pool.run(0, list(range(13)))
    pool.blocks.free(0)
    assert pool.run(1, list(range(13))) == 0
    pool.blocks.free(1)
    assert pool.run(2, list(range(13))) == 12


def test_salts_without_number_leave_nothing_behind():
    pool = Pool()
    for user in range(100):
        pool.run(user, [1, 2], salt=f"user {user}")
        pool.blocks.free(user)
    assert sum(len(value) for value in vars(pool.prefixes._cache).values() if isinstance(value, dict)) == 0


def test_check_finds_a_map_that_contradicts_itself():
    cache = PrefixCache(4)
    cache.insert(0, cache.root(""), (1, 2, 3, 4))
    cache._key_of[1] = b"?"
    with pytest.raises(InvariantBroken, match="1 keys with a block != 2 blocks with a key"):
        cache.check()


def test_check_finds_a_block_that_two_contents_claim():
    """Known bug 23: an evicted block that the map still knows by what it held before."""
    cache = PrefixCache(4)
    for tokens in ((1, 2, 3, 4), (5, 6, 7, 8)):
        cache.insert(0, cache.root(""), tokens)
    with pytest.raises(InvariantBroken, match="2 keys with a block != 1 blocks with a key"):
        cache.check()
