"""The conservation law under any sequence of operations, on shuffled free lists, against a shadow model.

The shadow knows what every sequence must read. Two pools of lists, the device's and the host's, are written through the
block tables, copies and swaps are applied as they are asked for, and after every rule each sequence must read back
exactly its own tokens, those included that came from the prefix cache.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from minipaged.blocks.block_table import blocks_for
from minipaged.blocks.eviction import EvictFewestHits, EvictLeastRecentlyUsed
from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_cache import PrefixCache
from minipaged.blocks.prefix_sharing import PrefixSharing
from minipaged.blocks.swap import move, num_blocks_to_move
from minipaged.errors import OutOfBlocks

POLICIES = st.sampled_from([EvictLeastRecentlyUsed, EvictFewestHits])
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # two tokens only: beginnings often agree


class BlockManagerMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    swapped = Bundle("swapped")  # groups, each a tuple of sequences
    pins = Bundle("pins")

    @initialize(
        block_size=st.integers(1, 5),
        free_order=st.permutations(range(12)),
        num_host_blocks=st.integers(0, 8),
        policy=POLICIES,
    )
    def start(self, block_size, free_order, num_host_blocks, policy):
        self.block_size = block_size
        cache = PrefixCache(block_size)
        self.blocks = BlockManager(len(free_order), block_size, free_order, cache, policy())
        self.prefixes = PrefixSharing(self.blocks, cache)
        self.host = BlockManager(num_host_blocks, block_size, pool="host")
        self.pool = {block: [None] * block_size for block in free_order}
        self.host_pool = {block: [None] * block_size for block in range(num_host_blocks)}
        self.out: dict[int, list[int]] = {}  # what each swapped sequence must read
        self.tokens: dict[int, list[int]] = {}  # the shadow: what each sequence must read
        self.salts: dict[int, str] = {}
        self.pinned: dict[int, tuple[tuple[int, ...], list[list[int]]]] = {}
        self.ids = itertools.count()

    def _grow(self, seq, new_tokens):
        """Write new tokens at the end of a sequence; False where the pool has no room."""
        before = {other: self.blocks.table(other).entries() for other in self.tokens if other != seq}
        begin = len(self.tokens.get(seq, []))
        target = begin + len(new_tokens)
        needed, free = self.blocks.num_blocks_needed([(seq, target)]), self.blocks.num_free
        try:
            copies = self.blocks.grow(seq, target)
        except OutOfBlocks:
            assert needed > free == self.blocks.num_free
            return False
        assert free - self.blocks.num_free == needed <= free
        for source, destination in copies:
            assert self.blocks.allocator.ref_count(destination) == 1
            self.pool[destination] = list(self.pool[source])
        table = self.blocks.table(seq).physical_blocks
        for position, token in enumerate(new_tokens, begin):
            block = table[position // self.block_size]
            assert self.blocks.allocator.ref_count(block) == 1, "a write into a block that others read"
            self.pool[block][position % self.block_size] = token
        self.tokens.setdefault(seq, []).extend(new_tokens)
        assert before == {other: self.blocks.table(other).entries() for other in before}
        self.prefixes.note_full_blocks(seq, lambda a, b: tuple(self.tokens[seq][a:b]), self.salts[seq])
        return True

    @rule(target=sequences, prompt=PROMPTS, salt=st.sampled_from(["", "mine"]))
    def add(self, prompt, salt):
        """A request arrives: it begins with what the cache knows, and computes the rest."""
        seq = next(self.ids)
        self.salts[seq] = salt
        prefix = self.prefixes.find(prompt[:-1], salt)
        if blocks_for(len(prompt), self.block_size) - len(prefix.blocks) + prefix.num_revived > self.blocks.num_free:
            return seq
        cached = len(prefix.blocks) * self.block_size
        if prefix.blocks:
            self.prefixes.begin_with(seq, prefix)
            self.tokens[seq] = prompt[:cached]
        assert self._grow(seq, prompt[cached:]), "what was counted beforehand must fit"
        return seq

    @rule(seq=sequences, new_tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, seq, new_tokens):
        if seq in self.tokens:
            self._grow(seq, new_tokens)

    @rule(target=sequences, parent=sequences)
    def fork(self, parent):
        child = next(self.ids)
        if parent in self.tokens:
            free = self.blocks.num_free
            self.blocks.fork(parent, child)
            assert self.blocks.num_free == free
            assert self.blocks.table(child).entries() == self.blocks.table(parent).entries()
            self.tokens[child], self.salts[child] = list(self.tokens[parent]), self.salts[parent]
        return child

    @rule(seqs=st.lists(sequences, min_size=2, max_size=4, unique=True))
    def several_append_one_token_each(self, seqs):
        """The forecast for a whole step is exact, sharers of one block included."""
        live = [seq for seq in seqs if seq in self.tokens]
        needed = self.blocks.num_blocks_needed([(seq, len(self.tokens[seq]) + 1) for seq in live])
        free = self.blocks.num_free
        if needed <= free:
            assert all([self._grow(seq, [seq % 2]) for seq in live])
            assert free - self.blocks.num_free == needed

    @rule(seq=consumes(sequences))
    def free(self, seq):
        self.blocks.free(seq)
        self.tokens.pop(seq, None)

    @rule(seqs=st.lists(consumes(sequences), min_size=2, max_size=4))
    def abort_a_group(self, seqs):
        for seq in seqs:
            self.free(seq)

    @rule(seq=sequences)
    def recompute(self, seq):
        """All blocks go back, and the same tokens are one prefill, of which the cache may still have the beginning."""
        if seq in self.tokens:
            tokens = self.tokens[seq]
            self.blocks.free(seq)
            del self.tokens[seq]
            prefix = self.prefixes.find(tokens[:-1], self.salts[seq])
            needed = blocks_for(len(tokens), self.block_size) - len(prefix.blocks) + prefix.num_revived
            if needed <= self.blocks.num_free:
                cached = len(prefix.blocks) * self.block_size
                if prefix.blocks:
                    self.prefixes.begin_with(seq, prefix)
                    self.tokens[seq] = tokens[:cached]
                assert self._grow(seq, tokens[cached:])

    def _sharing(self, manager, seqs):
        """Which table entries of a group are the same block, as a picture without block numbers."""
        numbers = {}
        return [[numbers.setdefault(b, len(numbers)) for b in manager.table(seq).physical_blocks] for seq in seqs]

    @rule(target=swapped, seqs=st.lists(sequences, min_size=1, max_size=4, unique=True))
    def swap_out(self, seqs):
        seqs = tuple(seq for seq in seqs if seq in self.tokens)
        needed, free = num_blocks_to_move(seqs, self.blocks, self.host, {}), self.host.num_free
        sharing = self._sharing(self.blocks, seqs)
        if needed > free:
            with pytest.raises(OutOfBlocks):
                move(seqs, self.blocks, self.host, "swap_out", {})
            assert self._sharing(self.blocks, seqs) == sharing
            return ()
        pairs = move(seqs, self.blocks, self.host, "swap_out", {})
        assert len({b for b, _ in pairs}) == len({b for _, b in pairs}) == len(pairs) == free - self.host.num_free
        assert self._sharing(self.host, seqs) == sharing
        for source, target in pairs:
            self.host_pool[target] = list(self.pool[source])
        for seq in seqs:
            self.out[seq] = self.tokens.pop(seq)
        return seqs

    @rule(group=swapped)
    def swap_in(self, group):
        seqs = tuple(seq for seq in group if seq in self.out)
        known = {seq: self.prefixes.find(self.out[seq], self.salts[seq]) for seq in seqs}
        needed, free = num_blocks_to_move(seqs, self.host, self.blocks, known), self.blocks.num_free
        if needed > free:
            with pytest.raises(OutOfBlocks):
                move(seqs, self.host, self.blocks, "swap_in", known)
            assert self.blocks.num_free == free
            return
        pairs = move(seqs, self.host, self.blocks, "swap_in", known)
        assert free - self.blocks.num_free == needed
        for source, target in pairs:
            assert self.blocks.allocator.ref_count(target) > 0
            self.pool[target] = list(self.host_pool[source])
        for seq in seqs:
            self.tokens[seq] = self.out.pop(seq)
            self.prefixes.note_full_blocks(seq, lambda a, b, s=seq: tuple(self.tokens[s][a:b]), self.salts[seq])

    @rule(group=consumes(swapped))
    def abort_a_swapped_group(self, group):
        for seq in group:
            self.host.free(seq)
            self.out.pop(seq, None)

    @rule(target=pins, seq=sequences)
    def pin(self, seq):
        pin = next(self.ids)
        blocks = self.prefixes.pin(self.tokens.get(seq, []), self.salts.get(seq, ""))
        self.pinned[pin] = (blocks, [list(self.pool[block]) for block in blocks])
        return pin

    @rule(pin=consumes(pins))
    def unpin(self, pin):
        self.prefixes.unpin(self.pinned.pop(pin)[0])

    @rule()
    def forget_the_cache(self):
        self.prefixes.reset()
        assert self.blocks.allocator.cached == []

    @invariant()
    def the_conservation_law_holds(self):
        if hasattr(self, "blocks"):
            self.blocks.check()
            self.host.check()
            self.prefixes.check()

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        if hasattr(self, "blocks"):
            self._check_content(self.tokens, self.blocks, self.pool)
            self._check_content(self.out, self.host, self.host_pool)

    def _check_content(self, expected, manager, pool):
        for seq, tokens in expected.items():
            table = manager.table(seq).physical_blocks
            assert len(table) == blocks_for(len(tokens), self.block_size)
            assert [slot for block in table for slot in pool[block]][: len(tokens)] == tokens

    @invariant()
    def pinned_blocks_keep_their_content(self):
        for blocks, content in getattr(self, "pinned", {}).values():
            assert [self.pool[block] for block in blocks] == content

    def teardown(self):
        for seq in list(getattr(self, "tokens", {})):
            self.blocks.free(seq)
        for seq in getattr(self, "out", {}):
            self.host.free(seq)
        for blocks, _ in getattr(self, "pinned", {}).values():
            self.prefixes.unpin(blocks)
        if hasattr(self, "blocks"):
            for manager in (self.blocks, self.host):
                manager.check()
                assert manager.num_free == manager.num_blocks


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=max(500, settings.default.max_examples), stateful_step_count=50)
