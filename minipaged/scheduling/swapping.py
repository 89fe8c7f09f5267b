"""Who is swapped rather than recomputed, and what it takes to bring a group back (paper, section 4.5).

A swapped group keeps its KV: its blocks wait in the host pool, and it goes on where it was. The paper swaps groups of
several sequences, whose sharing a recompute would have to build again, and recomputes single ones; `preemption_mode`
decides otherwise. Where the host pool has no room left the group is recomputed: nothing is ever lost for want of space.

A step that fails may not have made its copies, and the device blocks belong to others by then. So a group that such a
step put out forgets what it has on the host, and is recomputed too.
"""

from __future__ import annotations

from collections.abc import Mapping

from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_sharing import Prefix, PrefixSharing
from minipaged.blocks.swap import distinct_blocks, move, num_blocks_to_move
from minipaged.scheduling.group import SequenceGroup
from minipaged.scheduling.recompute import give_up_blocks


class Swapping:
    """Moves groups between the device's pool and the host's."""

    def __init__(self, mode: str, blocks: BlockManager, host: BlockManager, prefixes: PrefixSharing | None) -> None:
        self._mode = mode
        self._blocks = blocks
        self._host = host
        self._prefixes = prefixes
        self._unconfirmed: dict[SequenceGroup, None] = {}  # swapped out by a plan that is not applied yet

    def takes(self, group: SequenceGroup) -> bool:
        """Whether the group shall be swapped, the host has room, and the device's pool can ever hold it again."""
        held = _held(group, self._blocks)
        if self._mode == "recompute" or not held or (self._mode == "auto" and len(group.live) == 1):
            return False
        num_blocks = len(distinct_blocks(held, self._blocks))
        at_return = num_blocks + num_blocks_to_grow(group, 0, self._blocks)
        return num_blocks <= self._host.num_free and at_return <= self._blocks.num_blocks

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Returns the copies to make: (device block, host block)."""
        self._unconfirmed[group] = None
        return move(_held(group, self._blocks), self._blocks, self._host, "swap_out", {})

    def find_known(self, group: SequenceGroup) -> dict[int, Prefix]:
        """What the prefix cache still has of a swapped group's sequences."""
        if self._prefixes is None:
            return {}
        salt = group.sampling.cache_salt
        held = [seq for seq in group.live if seq.seq_id in self._host]
        return {seq.seq_id: self._prefixes.find(seq.token_ids(0, seq.num_computed), salt) for seq in held}

    def demand(self, group: SequenceGroup, known: Mapping[int, Prefix]) -> int:
        """The free device blocks that a swapped group needs for all its present tokens."""
        moved = num_blocks_to_move(_held(group, self._host), self._host, self._blocks, known)
        return moved + num_blocks_to_grow(group, 0, self._host)

    def swap_in(self, group: SequenceGroup, known: Mapping[int, Prefix]) -> list[tuple[int, int]]:
        """Returns the copies to make: (host block, device block)."""
        return move(_held(group, self._host), self._host, self._blocks, "swap_in", known)

    def confirm(self) -> None:
        """The plans since the last time were applied: what they moved is where it should be."""
        self._unconfirmed.clear()

    def withdraw(self) -> list[SequenceGroup]:
        """They were not. Returns the groups that are swapped and must be recomputed instead."""
        lost = [group for group in self._unconfirmed if _held(group, self._host)]
        for group in lost:
            give_up_blocks(group, self._host)
        self._unconfirmed.clear()
        return lost


def num_blocks_to_grow(group: SequenceGroup, more: int, pool: BlockManager) -> int:
    """The blocks that the group lacks, where it is now, to hold its present tokens and `more` for each sequence."""
    needed = pool.num_blocks_needed((seq.seq_id, seq.num_tokens + more) for seq in group.live)
    return needed - sum(seq.stem.num_blocks for seq in group.live if seq.stem)


def _held(group: SequenceGroup, pool: BlockManager) -> list[int]:
    """The sequences of the group that have blocks in the pool."""
    return [seq.seq_id for seq in group.live if seq.seq_id in pool]
