"""The conservation law under any sequence of operations, on shuffled free lists, against a shadow model.

The shadow knows what every slot must hold. A real pool of lists is written through the block tables, copies are
applied as the manager asks for them, and after every rule each sequence must read back exactly its own tokens.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from minipaged.blocks.block_table import blocks_for
from minipaged.blocks.manager import BlockManager
from minipaged.errors import OutOfBlocks


class BlockManagerMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(block_size=st.integers(1, 5), free_order=st.permutations(range(12)))
    def start(self, block_size, free_order):
        self.block_size = block_size
        self.blocks = BlockManager(len(free_order), block_size, free_order)
        self.pool = {block: [None] * block_size for block in free_order}
        self.tokens: dict[int, list[int]] = {}  # the shadow: what each sequence must read
        self.ids = itertools.count()
        self.values = itertools.count()  # every written token is another one

    def _grow(self, seq, count):
        before = {other: self.blocks.table(other).entries() for other in self.tokens if other != seq}
        target = len(self.tokens.get(seq, [])) + count
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
        for position in range(target - count, target):
            block = table[position // self.block_size]
            assert self.blocks.allocator.ref_count(block) == 1, "a write into a block that others read"
            self.pool[block][position % self.block_size] = token = next(self.values)
            self.tokens.setdefault(seq, []).append(token)
        assert before == {other: self.blocks.table(other).entries() for other in before}
        return True

    @rule(target=sequences, count=st.integers(1, 14))
    def add(self, count):
        seq = next(self.ids)
        self._grow(seq, count)
        return seq

    @rule(seq=sequences, count=st.integers(1, 6))
    def append(self, seq, count):
        self._grow(seq, count)

    @rule(target=sequences, parent=sequences)
    def fork(self, parent):
        child = next(self.ids)
        if parent in self.tokens:
            free = self.blocks.num_free
            self.blocks.fork(parent, child)
            assert self.blocks.num_free == free
            assert self.blocks.table(child).entries() == self.blocks.table(parent).entries()
            self.tokens[child] = list(self.tokens[parent])
        return child

    @rule(seqs=st.lists(sequences, min_size=2, max_size=4, unique=True))
    def all_of_several_append_one_token(self, seqs):
        """The forecast for a whole step is exact, sharers of one block included."""
        live = [seq for seq in seqs if seq in self.tokens]
        needed = self.blocks.num_blocks_needed([(seq, len(self.tokens[seq]) + 1) for seq in live])
        free = self.blocks.num_free
        if needed <= free:
            assert all([self._grow(seq, 1) for seq in live])
            assert free - self.blocks.num_free == needed

    @rule(seq=consumes(sequences))
    def free(self, seq):
        self.blocks.free(seq)
        self.tokens.pop(seq, None)

    @invariant()
    def the_conservation_law_holds(self):
        if hasattr(self, "blocks"):
            self.blocks.check()

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for seq, tokens in getattr(self, "tokens", {}).items():
            table = self.blocks.table(seq).physical_blocks
            assert len(table) == blocks_for(len(tokens), self.block_size)
            assert [slot for block in table for slot in self.pool[block]][: len(tokens)] == tokens

    def teardown(self):
        for seq in list(getattr(self, "tokens", {})):
            self.blocks.free(seq)
        if hasattr(self, "blocks"):
            assert self.blocks.num_free == self.blocks.num_blocks


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(stateful_step_count=50)
