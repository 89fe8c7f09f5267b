"""Admission: which swapped and which waiting groups may start in this step.

The *whole* present demand of a group must fit, though only a chunk of it is reserved now, and one block must be left
for every running sequence that is about to cross a block border. Otherwise a recomputed prompt would come in, be put
out by its elders' next tokens, and so on for ever. Swapped groups come first, then waiting ones, each in order of
arrival, and the first that does not fit stops all behind it: so the host pool empties before it fills again.
"""

from __future__ import annotations

from collections.abc import Mapping

from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_sharing import Prefix, PrefixSharing
from minipaged.config import SchedulerConfig
from minipaged.scheduling.group import GroupState, SequenceGroup
from minipaged.scheduling.plan_builder import PlanBuilder
from minipaged.scheduling.queues import Queues
from minipaged.scheduling.recompute import demand, give_up_blocks, graft_siblings
from minipaged.scheduling.share import Share, divide
from minipaged.scheduling.swapping import Swapping, num_blocks_to_grow

Known = Mapping[int, Prefix]  # what the prefix cache has of each sequence's beginning, by sequence number


class Admission:
    """Moves groups from swapped or waiting to running, with their first share of the step."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        prefixes: PrefixSharing | None,
        swapping: Swapping,
        queues: Queues,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._prefixes = prefixes
        self._swapping = swapping
        self._queues = queues

    def admit(self, builder: PlanBuilder) -> list[SequenceGroup]:
        """Start whoever may start. Returns groups that never can: they do not fit though nobody runs (pins do that)."""
        if not self._queues.swapped and not self._queues.waiting:
            return []
        if not self._config.enable_chunked_prefill and any(group.is_prefill for group in self._queues.running):
            return []  # the decodes of newcomers could keep it from ever being fed whole
        impossible = []
        claimed = sum(self._still_needed(group) for group in self._queues.running)
        num_seqs = sum(group.num_seqs for group in self._queues.running)
        for group in (*self._queues.swapped, *self._queues.waiting):
            if num_seqs + group.num_seqs > self._config.max_num_seqs:
                break  # before the cache is asked for a whole prompt, in each step anew
            known = self._find_known(group)
            fits = claimed + self._demand(group, known) <= self._blocks.num_free
            if not fits and not self._queues.running:
                impossible.append(group)
                continue
            num_seqs += group.num_seqs
            if not fits or not self._start(group, known, builder):
                break
            claimed += self._still_needed(group)
        return impossible

    def _start(self, group: SequenceGroup, known: Known, builder: PlanBuilder) -> bool:
        """Give a group its first share of the step; False where the budget has nothing for it.

        A group takes cached blocks only together with a share: if this step fails, whoever reads its blocks must fail.
        """
        budget = self._config.max_num_batched_tokens - builder.num_tokens
        if budget <= 0:
            return False
        if group.state is GroupState.SWAPPED:
            shares = self._divide(group, budget)
            if shares:
                builder.swap_in += self._swapping.swap_in(group, known)
        else:
            shares = self._begin(group, known, budget)
        if not shares:
            return False
        self._queues.move(group, GroupState.RUNNING)
        for share in shares:
            builder.add(share)
        return True

    def _begin(self, group: SequenceGroup, known: Known, budget: int) -> list[Share]:
        """A waiting group begins with what is cached, or at its first token."""
        first = group.first_to_run
        prefix = known.get(first.seq_id)
        if prefix and prefix.blocks:  # before new blocks are taken: from now on these cannot be evicted
            self._prefixes.begin_with(first.seq_id, prefix)
            first.num_computed = len(prefix.blocks) * self._blocks.block_size
            graft_siblings(group, first, first.num_computed, self._blocks)
        num_cached = first.num_computed
        shares = self._divide(group, budget)
        if not shares:
            give_up_blocks(group, self._blocks)
        elif group.num_cached_tokens is None:
            group.num_cached_tokens = num_cached
        return shares

    def _divide(self, group: SequenceGroup, budget: int) -> list[Share]:
        return list(divide([group], budget, self._config))

    def _find_known(self, group: SequenceGroup) -> Known:
        """What the cache has of a group. One that waits must compute its last token: there are no logits without it."""
        if group.state is GroupState.SWAPPED:
            return self._swapping.find_known(group)
        if self._prefixes is None or not group.reads_cache:
            return {}
        seq = group.first_to_run
        return {seq.seq_id: self._prefixes.find(seq.token_ids(0, seq.num_tokens - 1), group.sampling.cache_salt)}

    def _demand(self, group: SequenceGroup, known: Known) -> int:
        """The free blocks that a group takes for all its present tokens."""
        if group.state is GroupState.SWAPPED:
            return self._swapping.demand(group, known)
        saved = sum(len(prefix.blocks) - prefix.num_revived for prefix in known.values())
        return demand(group, self._blocks.block_size) - saved

    def _still_needed(self, group: SequenceGroup) -> int:
        """The blocks that a running group lacks to hold its present tokens and the next one of each sequence.

        A sample that is still to be forked will take one block: a copy of the partial one, or a new one behind it.
        """
        return num_blocks_to_grow(group, 1, self._blocks) + group.num_unforked
