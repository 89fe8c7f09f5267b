"""Which cached block goes when a free one is needed: a small policy, replaceable.

A policy sees the blocks that nobody references and that are still worth something: they were filled, their content is
known, and a later request may begin with it. When a sequence is freed, its blocks are released from the last one to
the first, since a block is of no use without those before it. So whoever is released first may go first.
"""

from __future__ import annotations

from typing import Protocol

from minipaged.errors import InvalidParameter


class EvictionPolicy(Protocol):
    """Holds the evictable blocks. To try another idea, write these five methods (EvictFewestHits is an example)."""

    def release(self, block: int) -> None:
        """The block has lost its last reference: from now on it may be evicted."""
        ...

    def reuse(self, block: int, is_hit: bool) -> None:
        """The block is taken out of the evictable ones: it was hit, or (False) its content is void."""
        ...

    def evict(self) -> int:
        """Choose one of the evictable blocks, which are not empty, and take it out."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class EvictLeastRecentlyUsed:
    """The block that has been without a reference for longest. A dict keeps them in that order."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def release(self, block: int) -> None:
        self._blocks[block] = None

    def reuse(self, block: int, is_hit: bool) -> None:
        del self._blocks[block]

    def evict(self) -> int:
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks


class EvictFewestHits(EvictLeastRecentlyUsed):
    """The block that was hit least often; of several the least recently used one. An example of a policy of one's own.

    A system prompt that thousands of requests began with outlives a long document that one request brought by. Only
    hits that revive a block are seen here: one that somebody holds is in no danger.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hits: dict[int, int] = {}

    def reuse(self, block: int, is_hit: bool) -> None:
        super().reuse(block, is_hit)
        if is_hit:
            self._hits[block] = self._hits.get(block, 0) + 1
        else:
            self._hits.pop(block, None)  # it will hold something else

    def evict(self) -> int:
        block = min(self._blocks, key=lambda block: self._hits.get(block, 0))  # the first of equals is the oldest
        self.reuse(block, is_hit=False)
        return block


def check_eviction_policy(policy: EvictionPolicy | None, enable_prefix_caching: bool) -> None:
    """It keeps the blocks of one cache: there must be one, and it must not keep another engine's already."""
    if policy is None:
        return
    if not enable_prefix_caching:
        raise InvalidParameter("eviction_policy", policy, "needs enable_prefix_caching = True")
    methods = ("release", "reuse", "evict", "__len__", "__contains__")
    if not isinstance(policy, type) and not all(callable(getattr(policy, name, None)) for name in methods):
        raise InvalidParameter("eviction_policy", policy, f"must be an object with the methods {', '.join(methods)}")
    if isinstance(policy, type) or len(policy) > 0:
        raise InvalidParameter("eviction_policy", policy, "must be a new object: each engine needs one of its own")
