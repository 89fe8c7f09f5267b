"""The prefix cache: full blocks by their content, so that a prompt begun before is not computed again.

    root ── [a b c d] ── [e f g h] ── [i j k l]          each entry is a full block that some sequence has filled;
                │                                        its key is a hash of its own tokens and of its parent's key,
                └─────── [e f x y]                       so it stands for the whole beginning up to its end

A block's KV depends on all tokens before it, so only a chain from the root may be used, and only full blocks have an
entry: a partial one will still be written. The hash finds an entry and never proves one: a hit is compared with the
tokens, and its parent must be the entry that was hit before it. A salt gives a root of its own: requests with other
salts never share.

A block may be forgotten before those behind it (an eviction policy's choice, a reset while a sequence runs). They are
orphans then: nobody finds them, and their keys are in the way of whoever fills the same blocks anew (`orphan`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from minipaged.errors import InvariantBroken


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """The content of one full block. Two are the same only if they are the same object, or roots of the same salt."""

    key: bytes
    parent: Entry | None  # None: a root, which is no block
    token_ids: tuple[int, ...]  # of a root, the bytes of its salt

    def is_same(self, other: Entry) -> bool:
        return self is other or (self.parent is None is other.parent and self.token_ids == other.token_ids)


def block_key(parent_key: bytes, token_ids: Sequence[int]) -> bytes:
    """The chained hash: equal in every process, and not guessable into a collision."""
    return hashlib.blake2b(parent_key + array("q", token_ids).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Which block holds which content. Reference counts and eviction are the allocator's."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._entries: dict[bytes, Entry] = {}
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        """Whether the block's content can be found."""
        return block in self._key_of

    def root(self, salt: str) -> Entry:
        """Where the chains of requests with this salt begin. Made anew each time: salts may be without number."""
        name = salt.encode()
        return Entry(hashlib.blake2b(name, digest_size=16).digest(), None, tuple(name))

    def lookup(self, token_ids: Sequence[int], salt: str) -> list[tuple[int, Entry]]:
        """The longest known beginning of the tokens: (block, entry) of each of its full blocks, from the first one
        on.
        """
        found: list[tuple[int, Entry]] = []
        parent = self.root(salt)
        for begin in range(0, len(token_ids) // self.block_size * self.block_size, self.block_size):
            tokens = tuple(token_ids[begin : begin + self.block_size])
            entry = self._entries.get(block_key(parent.key, tokens))
            if entry is None or not entry.parent.is_same(parent) or entry.token_ids != tokens:
                break
            found.append((self._block_of[entry.key], entry))
            parent = entry
        return found

    def insert(self, block: int, parent: Entry, token_ids: tuple[int, ...]) -> tuple[Entry, bool]:
        """Make a full block's content known. Returns its entry, and whether this block now stands for it.

        Where another block has the same content already (or, by a collision, the same key), that one keeps the key.
        """
        key = block_key(parent.key, token_ids)
        known = self._entries.get(key)
        if known is not None:
            same = known.parent.is_same(parent) and known.token_ids == token_ids
            return (known if same else Entry(key, parent, token_ids)), False
        entry = self._entries[key] = Entry(key, parent, token_ids)
        self._block_of[key] = block
        self._key_of[block] = key
        return entry, True

    def orphan(self, parent: Entry, token_ids: tuple[int, ...]) -> int | None:
        """The block that has the key of this content and that nobody can find, since its own parent was forgotten."""
        known = self._entries.get(block_key(parent.key, token_ids))
        if known is None or known.parent.parent is None or self._entries.get(known.parent.key) is known.parent:
            return None
        return self._block_of[known.key]

    def forget(self, block: int) -> None:
        """The block will hold something else, or never held what its entry says."""
        key = self._key_of.pop(block)
        del self._block_of[key], self._entries[key]

    def blocks(self) -> list[int]:
        """Every block whose content is known."""
        return list(self._key_of)

    def check(self) -> None:
        """Key → block and block → key are inverse, and every key has its entry."""
        inverse = {key: block for block, key in self._key_of.items()}
        if inverse != self._block_of or len(inverse) != len(self._key_of):
            raise InvariantBroken(f"{len(self._block_of)} keys with a block != {len(self._key_of)} blocks with a key")
        if self._entries.keys() != self._block_of.keys():
            raise InvariantBroken(f"{len(self._entries)} entries != {len(self._block_of)} keys with a block")
