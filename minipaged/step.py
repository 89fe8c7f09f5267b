"""The contract between the two planes: what the scheduler asks of the worker in one step, and what comes back.

    control plane                    StepPlan                    data plane
    (plain Python)   ──────────────────────────────────────▶   (torch)
                     ◀──────────────────────────────────────
                                    StepResult

This is the control message of the paper (section 4.6) as frozen dataclasses of plain numbers. Nothing else crosses, so
the same control plane can drive a real model, several ranks, a picture, or a cost model.

The order inside a step is fixed here: swap out, swap in, copies, and then in each layer all KV writes before all reads.
Blocks that were swapped out may be handed out again in the same step, so they must be read before anything is written;
a copy reads a block as it was before this step's tokens are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minipaged.sampling_rules import SamplingRules


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """One row of the ragged batch: some of a sequence's uncomputed tokens, and where their KV goes."""

    seq_id: int
    token_ids: tuple[int, ...]  # the tokens to feed, never empty
    start: int  # position of the first of them = how many tokens of this sequence are in the cache already
    block_table: tuple[int, ...]  # physical block of each logical block, covering start + len(token_ids) positions
    table_version: int  # another number whenever block_table is another one: lets a worker cache the row


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw tokens from the distribution after the last token of work row `row`.

    Several draws from one row happen once in a group's life: after its prompt, one for each of its n samples.
    """

    row: int  # index into StepPlan.work
    draws: tuple[tuple[int, int], ...]  # (seed, output position, from 0 on); the noise is a function of nothing else
    rules: SamplingRules
    needs_logprob: bool = False  # the drawn token's log-probability is wanted even where rules.num_logprobs is None
    prompt_token_ids: tuple[int, ...] = ()  # only where rules.reads_history
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BestCandidates:
    """The k most probable continuations of work row `row` (for beam search)."""

    row: int
    k: int


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """The log-probabilities of the prompt tokens that follow those fed in work row `row` (for `prompt_logprobs`)."""

    row: int
    targets: tuple[int, ...]  # targets[i] follows the fed token number first + i of the row
    num_logprobs: int  # how many of the best beside the target; -1: all
    first: int = 0  # > 0 where a recomputed row feeds tokens whose successors were scored before


SamplingWork = Sample | BestCandidates | ScorePrompt


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the worker needs for one step. Pairs in moves are (source block, destination block)."""

    step: int
    work: tuple[SequenceWork, ...]
    sampling: tuple[SamplingWork, ...]
    swap_out: tuple[tuple[int, int], ...] = ()  # device block -> host block
    swap_in: tuple[tuple[int, int], ...] = ()  # host block -> device block
    copies: tuple[tuple[int, int], ...] = ()  # device block -> device block (copy-on-write)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.work)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute and nothing to move. A swap out can stand alone, when everybody is put out."""
        return not (self.work or self.swap_out)


class TokenLogprob(NamedTuple):
    """A token with its log-probability under the raw logits; rank 1 is the most probable token."""

    token_id: int
    logprob: float
    rank: int


class Draw(NamedTuple):
    """One drawn token. `logprob` is None where nobody asked; `best` holds the most probable tokens, best first."""

    token_id: int
    logprob: TokenLogprob | None
    best: tuple[TokenLogprob, ...]


class ScoredToken(NamedTuple):
    """One prompt token's log-probability, and the most probable tokens in its place, best first."""

    target: TokenLogprob
    best: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """An entry for each entry of StepPlan.sampling: its draws, its candidates (best first), or its scored targets."""

    entries: tuple[tuple[Draw, ...] | tuple[TokenLogprob, ...] | tuple[ScoredToken, ...], ...]
