"""Prefix caching at work: how a sequence begins with blocks that others have filled (automatic prefix caching, and the
paper's shared prefix, section 4.4).

    request A   a b c d | e f g h | i j           computed, its two full blocks become known
    request B   a b c d | e f g h | x             begins with A's two blocks (one more reference each) and computes x

A block is known from the moment its last slot is *planned*, not computed: in each layer of a step all KV is written
before any is read, so a request of the same step may begin with it. Should that step fail, `withdraw` makes it
unknown again; whoever began with it was part of that step and has failed with it.

Blocks that a sequence generates become known too, so the next turn of a chat begins where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from minipaged.blocks.block_table import BlockTable
from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_cache import Entry, PrefixCache


class Prefix(NamedTuple):
    """A known beginning: whole blocks."""

    blocks: tuple[int, ...]
    entries: tuple[Entry, ...]
    num_revived: int  # how many of the blocks nobody references: taking them uses up what counts as free


NOTHING = Prefix((), (), 0)


class PrefixSharing:
    """The prefix cache over a block manager's tables."""

    def __init__(self, blocks: BlockManager, cache: PrefixCache) -> None:
        self._blocks = blocks
        self._cache = cache

    def find(self, token_ids: Sequence[int], salt: str) -> Prefix:
        """The longest known beginning of the tokens."""
        found = self._cache.lookup(token_ids, salt)
        revived = sum(self._blocks.allocator.ref_count(block) == 0 for block, _ in found)
        return Prefix(tuple(block for block, _ in found), tuple(entry for _, entry in found), revived)

    def begin_with(self, seq_id: int, prefix: Prefix) -> None:
        """A table for a new sequence that begins with these blocks. From now on they cannot be evicted."""
        size, versions = self._blocks.block_size, self._blocks.versions
        num_filled = len(prefix.blocks) * size
        table = BlockTable.of(list(prefix.blocks), num_filled, list(prefix.entries), size, versions)
        self._blocks.share_all(seq_id, table, "hit")

    def note_full_blocks(self, seq_id: int, token_ids: Callable[[int, int], tuple[int, ...]], salt: str) -> list[int]:
        """Make known what the sequence has filled since the last time; returns the blocks that are new to the cache.

        `token_ids(start, stop)` gives the sequence's tokens.
        """
        table, size = self._blocks.table(seq_id), self._blocks.block_size
        new_blocks = []
        for logical in range(len(table.chain), table.num_filled // size):
            parent = table.chain[-1] if table.chain else self._cache.root(salt)
            tokens = token_ids(logical * size, (logical + 1) * size)
            orphan = self._cache.orphan(parent, tokens)
            if orphan is not None:
                self._blocks.allocator.forget(orphan)
            entry, is_new = self._cache.insert(table[logical], parent, tokens)
            table.chain.append(entry)
            if is_new:
                new_blocks.append(table[logical])
        return new_blocks

    def withdraw(self, blocks: Iterable[int]) -> None:
        """These blocks became known in a step that failed: their content was never computed."""
        for block in blocks:
            if block in self._cache:
                self._blocks.allocator.forget(block)

    def reset(self) -> None:
        """Know nothing any more. Sequences that run keep their blocks."""
        self.withdraw(self._cache.blocks())

    def pin(self, token_ids: Sequence[int], salt: str) -> tuple[int, ...]:
        """Hold the known blocks of a beginning until `unpin`."""
        blocks = self.find(token_ids, salt).blocks
        for block in blocks:
            self._blocks.allocator.share(block)
        self._blocks.pinned += blocks
        return blocks

    def unpin(self, blocks: tuple[int, ...]) -> None:
        """Let go of what `pin` returned, the tail first."""
        for block in reversed(blocks):
            self._blocks.pinned.remove(block)
            if self._blocks.allocator.free(block):
                self._blocks.note("free", None, (block,))

    def check(self) -> None:
        self._cache.check()
