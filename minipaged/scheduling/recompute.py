"""Recompute of several sequences keeps their sharing: what they have in common is computed once and shared again.

Three samples of one request lost their blocks (block size 4; a … g are tokens):

    A  a b c d  e f g g  h            sorted, neighbours share the most:   A  B  C
    B  a b c d  e f g g  i j          stem of B: two blocks of A
    C  a b c d  e k                   stem of C: one block of B

A comes back as an ordinary prefill. As soon as it is planned that far, B takes its first two blocks (one more reference
each), and C the first one of B: they go on from there. So the group never asks for more blocks than there are different
ones, plus the partial last block of each sequence.
"""

from __future__ import annotations

from minipaged.blocks.block_table import blocks_for
from minipaged.blocks.manager import BlockManager
from minipaged.scheduling.group import GroupState, SequenceGroup
from minipaged.scheduling.queues import Queues
from minipaged.scheduling.sequence import Sequence, Stem


def give_up_blocks(group: SequenceGroup, blocks: BlockManager) -> None:
    """Preemption by recompute: free all blocks of a group, and note what its sequences will share when they return."""
    for seq in group.live:
        blocks.free(seq.seq_id)
        seq.num_once_computed = max(seq.num_once_computed, seq.num_computed)
        seq.num_computed = 0
        seq.stem = None
    ordered = sorted(group.live, key=lambda seq: seq.token_ids(0, seq.num_tokens))
    for parent, seq in zip(ordered, ordered[1:], strict=False):
        common = _common_length(parent.token_ids(0, parent.num_tokens), seq.token_ids(0, seq.num_tokens))
        num_blocks = min(common, seq.num_tokens - 1) // blocks.block_size  # at least one token is computed
        if num_blocks > 0:
            seq.stem = Stem(parent, num_blocks)


def start_over(queues: Queues, blocks: BlockManager, host: BlockManager) -> None:
    """After a plan that was never applied: its blocks may hold anything, and its copies were not made. All that ran, or
    was about to, is computed again.
    """
    for group in (*queues.running, *queues.waiting, *queues.swapped):
        if group.state is GroupState.SWAPPED and not any(seq.seq_id in blocks for seq in group.live):
            continue
        give_up_blocks(group, host)
        give_up_blocks(group, blocks)
        if group.state is not GroupState.WAITING:
            queues.move(group, GroupState.WAITING)


def demand(group: SequenceGroup, block_size: int) -> int:
    """The blocks that a group without any needs for all its present tokens."""
    whole = sum(blocks_for(seq.num_tokens, block_size) for seq in group.live)
    return whole - sum(seq.stem.num_blocks for seq in group.live if seq.stem)


def graft_siblings(group: SequenceGroup, parent: Sequence, num_computed: int, blocks: BlockManager) -> None:
    """Those that wait for the parent's first blocks take them once they are computed, or planned to be; and so on."""
    grown = [(parent, num_computed)]
    for parent, num_computed in grown:  # the list grows meanwhile: a chain of stems may be as long as the group
        for seq in group.live:
            if seq.stem and seq.stem.sibling is parent and seq.stem.num_blocks * blocks.block_size <= num_computed:
                blocks.share_prefix(parent.seq_id, seq.seq_id, seq.stem.num_blocks)
                seq.num_computed = seq.stem.num_blocks * blocks.block_size
                seq.stem = None
                grown.append((seq, seq.num_computed))


def _common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
