"""A prefix that stays cached as long as somebody wants it, whatever else comes and goes (paper, section 4.4)."""

from __future__ import annotations

import threading

from minipaged.blocks.prefix_sharing import PrefixSharing


class PinnedPrefix:
    """Holds the blocks of a prefix in the cache until `release()`, or the end of a with block."""

    def __init__(self, prefixes: PrefixSharing, blocks: tuple[int, ...], lock: threading.RLock) -> None:
        self.blocks = blocks
        self._prefixes = prefixes
        self._lock = lock

    def release(self) -> None:
        """Let go. The blocks stay cached as any others do, until they are evicted. Again is no error."""
        with self._lock:
            self._prefixes.unpin(self.blocks)
            self.blocks = ()

    def __enter__(self) -> PinnedPrefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
