"""From "these sequences run, with so many tokens each" to the StepPlan that says it in plain integers.

This is where a running sequence's blocks are taken, and where it is decided which rows sample: those whose chunk
reaches the end of the sequence, since only the last token's logits speak about a token that is not there yet.
"""

from __future__ import annotations

from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_sharing import PrefixSharing
from minipaged.scheduling.group import SequenceGroup
from minipaged.scheduling.recompute import graft_siblings
from minipaged.scheduling.sequence import Sequence
from minipaged.scheduling.share import Share
from minipaged.step import BestCandidates, Sample, SamplingWork, ScorePrompt, SequenceWork, StepPlan


class PlanBuilder:
    """Collects shares into a plan, reserving their blocks as they come. `new_blocks` takes the blocks that the prefix
    cache knows since this plan.
    """

    def __init__(self, step: int, blocks: BlockManager, prefixes: PrefixSharing | None, new_blocks: list[int]) -> None:
        self.shares: list[Share] = []
        self.num_tokens = 0
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self._step = step
        self._blocks = blocks
        self._prefixes = prefixes
        self._new_blocks = new_blocks
        self._work: list[SequenceWork] = []
        self._sampling: list[SamplingWork] = []
        self._copies: list[tuple[int, int]] = []

    def add(self, share: Share) -> None:
        """Reserve the blocks of one share and write its row; the caller has made sure that they are there.

        All KV of a layer is written before any is read, so siblings may take the beginning that this row computes now.
        """
        group, seq, num_tokens = share
        self._copies += self._blocks.grow(seq.seq_id, share.end)
        table = self._blocks.table(seq.seq_id)
        row = len(self._work)
        self._work.append(
            SequenceWork(
                seq.seq_id,
                seq.token_ids(seq.num_computed, share.end),
                seq.num_computed,
                table.physical_blocks,
                table.version,
            )
        )
        if group.sampling.num_prompt_logprobs is not None:
            self._score_prompt(row, share)
        if share.end == seq.num_tokens:
            self._sample(row, group, seq)
        if self._prefixes is not None:
            self._new_blocks += self._prefixes.note_full_blocks(seq.seq_id, seq.token_ids, group.sampling.cache_salt)
        if len(group.sequences) > 1:
            graft_siblings(group, seq, share.end, self._blocks)
        self.shares.append(share)
        self.num_tokens += num_tokens

    def build(self) -> StepPlan:
        moves = tuple(self.swap_out), tuple(self.swap_in), tuple(self._copies)
        return StepPlan(self._step, tuple(self._work), tuple(self._sampling), *moves)

    def _sample(self, row: int, group: SequenceGroup, seq: Sequence) -> None:
        sampling = group.sampling
        if sampling.num_candidates:
            self._sampling.append(BestCandidates(row, sampling.num_candidates))
            return
        draws = tuple((seq.seed + i, seq.num_output_tokens) for i in range(1 + group.num_unforked))
        histories = (seq.prompt_token_ids, seq.output_token_ids) if sampling.rules.reads_history else ((), ())
        self._sampling.append(Sample(row, draws, sampling.rules, sampling.needs_logprob, *histories))

    def _score_prompt(self, row: int, share: Share) -> None:
        """Score the prompt tokens that follow the fed ones, each once: a recompute feeds them again, in silence."""
        group, seq, _ = share
        begin = max(seq.num_computed + 1, group.num_scored)
        targets = seq.token_ids(begin, min(share.end + 1, seq.num_prompt_tokens))
        if targets:
            first = begin - 1 - seq.num_computed
            self._sampling.append(ScorePrompt(row, targets, group.sampling.num_prompt_logprobs, first))
