"""Admission: which waiting groups may start in this step.

The *whole* present demand of a group must fit, though only a chunk of it is reserved now, and one block must be left
for every running sequence that is about to cross a block border. Otherwise a recomputed prompt would come in, be put
out by its elders' next tokens, and so on for ever. In order of arrival, and the first that does not fit stops all
behind it.
"""

from __future__ import annotations

from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_sharing import NOTHING, Prefix, PrefixSharing
from minipaged.config import SchedulerConfig
from minipaged.scheduling.group import GroupState, SequenceGroup
from minipaged.scheduling.plan_builder import PlanBuilder
from minipaged.scheduling.queues import Queues
from minipaged.scheduling.recompute import demand, give_up_blocks, graft_siblings
from minipaged.scheduling.share import divide


class Admission:
    """Moves groups from waiting to running, with their first share of the step."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, prefixes: PrefixSharing | None, queues: Queues
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._prefixes = prefixes
        self._queues = queues

    def admit(self, builder: PlanBuilder) -> list[SequenceGroup]:
        """Start whoever may start. Returns groups that never can: they do not fit though nobody runs (pins do that)."""
        if not self._queues.waiting:
            return []
        impossible = []
        claimed = sum(self._still_needed(group) for group in self._queues.running)
        num_seqs = sum(group.num_seqs for group in self._queues.running)
        for group in tuple(self._queues.waiting):
            prefix = self._find_prefix(group)
            needed = demand(group, self._blocks.block_size) - len(prefix.blocks) + prefix.num_revived
            fits = claimed + needed <= self._blocks.num_free
            if not fits and not self._queues.running:
                impossible.append(group)
                continue
            num_seqs += group.num_seqs
            if not fits or num_seqs > self._config.max_num_seqs or not self._start(group, prefix, builder):
                break
            claimed += self._still_needed(group)
        return impossible

    def _start(self, group: SequenceGroup, prefix: Prefix, builder: PlanBuilder) -> bool:
        """Give a waiting group its first share of the step; False where the budget has nothing for it.

        A group takes cached blocks only together with a share: if this step fails, whoever reads its blocks must fail.
        """
        budget = self._config.max_num_batched_tokens - builder.num_tokens
        if budget <= 0:
            return False
        first = group.first_to_run
        if prefix.blocks:  # before new blocks are taken: from now on these cannot be evicted
            self._prefixes.begin_with(first.seq_id, prefix)
            first.num_computed = len(prefix.blocks) * self._blocks.block_size
            graft_siblings(group, first, first.num_computed, self._blocks)
        num_cached = first.num_computed
        shares = list(divide([group], budget, self._config.enable_chunked_prefill))
        if not shares:
            give_up_blocks(group, self._blocks)
            return False
        if group.num_cached_tokens is None:
            group.num_cached_tokens = num_cached
        self._queues.move(group, GroupState.RUNNING)
        for share in shares:
            builder.add(share)
        return True

    def _find_prefix(self, group: SequenceGroup) -> Prefix:
        """What the cache knows of the group's beginning, short of its last token: without that there are no logits."""
        if self._prefixes is None or not group.reads_cache:
            return NOTHING
        seq = group.first_to_run
        return self._prefixes.find(seq.token_ids(0, seq.num_tokens - 1), group.sampling.cache_salt)

    def _still_needed(self, group: SequenceGroup) -> int:
        """The blocks that a running group lacks to hold its present tokens and the next one of each sequence.

        A sample that is still to be forked will take one block: a copy of the partial one, or a new one behind it.
        """
        needed = self._blocks.num_blocks_needed((seq.seq_id, seq.num_tokens + 1) for seq in group.live)
        return needed + group.num_unforked - sum(seq.stem.num_blocks for seq in group.live if seq.stem)
