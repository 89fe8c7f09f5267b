"""The prefix cache: full blocks by their content, so that a prompt begun before is not computed again.

    root ── [a b c d] ── [e f g h] ── [i j k l]          each entry is a full block that some sequence has filled;
                │                                        its key is a hash of its own tokens and of its parent's key,
                └─────── [e f x y]                       so it stands for the whole beginning up to its end

A block's KV depends on all tokens before it, so only a chain from the root may be used, and only full blocks have an
entry: a partial one will still be written. The hash finds an entry and never proves one: a hit is compared with the
tokens, and its parent must be the entry that was hit before it. A salt gives a root of its own: requests with other
salts never share.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from weakref import WeakValueDictionary

from minipaged.errors import InvariantBroken


class Entry:
    """The content of one full block. Two entries are the same only if they are the same object.

    `parent` is the content before it. None makes a root: no block, and there as long as a chain that begins with it.
    """

    __slots__ = ("__weakref__", "key", "parent", "token_ids")

    def __init__(self, key: bytes, parent: Entry | None, token_ids: tuple[int, ...]) -> None:
        self.key = key
        self.parent = parent
        self.token_ids = token_ids


def block_key(parent_key: bytes, token_ids: Sequence[int]) -> bytes:
    """The chained hash: equal in every process, and not guessable into a collision."""
    return hashlib.blake2b(parent_key + array("q", token_ids).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Which block holds which content. Reference counts and eviction are the allocator's."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: WeakValueDictionary[str, Entry] = WeakValueDictionary()  # salts may be as many as requests
        self._entries: dict[bytes, Entry] = {}
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        """Whether the block's content can be found."""
        return block in self._key_of

    def root(self, salt: str) -> Entry:
        """Where the chains of requests with this salt begin."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Entry(hashlib.blake2b(salt.encode(), digest_size=16).digest(), None, ())
        return root

    def lookup(self, token_ids: Sequence[int], salt: str) -> list[tuple[int, Entry]]:
        """The longest known beginning of the tokens: (block, entry) of each of its full blocks, from the first one
        on.
        """
        found: list[tuple[int, Entry]] = []
        parent = self.root(salt)
        for begin in range(0, len(token_ids) // self.block_size * self.block_size, self.block_size):
            tokens = tuple(token_ids[begin : begin + self.block_size])
            entry = self._entries.get(block_key(parent.key, tokens))
            if entry is None or entry.parent is not parent or entry.token_ids != tokens:
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
            same = known.parent is parent and known.token_ids == token_ids
            return (known if same else Entry(key, parent, token_ids)), False
        entry = self._entries[key] = Entry(key, parent, token_ids)
        self._block_of[key] = block
        self._key_of[block] = key
        return entry, True

    def forget(self, block: int) -> None:
        """The block will hold something else, or never held what its entry says."""
        key = self._key_of.pop(block)
        del self._block_of[key], self._entries[key]

    def blocks(self) -> list[int]:
        """Every block whose content is known."""
        return list(self._key_of)

    def check(self) -> None:
        """Key → block and block → key are inverse, and every key has its entry."""
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise InvariantBroken(f"{len(self._block_of)} keys with a block != {len(self._key_of)} blocks with a key")
        if self._entries.keys() != self._block_of.keys():
            raise InvariantBroken(f"{len(self._entries)} entries != {len(self._block_of)} keys with a block")
