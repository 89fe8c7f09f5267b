"""Beam search: of all continuations of k beams, which k run on, and which are finished? A pure function of one step.

Each step every beam proposes its most probable tokens, and all proposals are ranked together by their summed
log-probability. With k = 3:

    running            proposals, ranked                        running, one step later
    0  -0.7  the       1  -1.0  a dog      of beam 1  ───────▶  0  -1.0  a dog     parent 1
    1  -0.9  a         2  -1.2  a </s>     of beam 1  ── ✓ a finished hypothesis
    2  -1.6  one       3  -1.3  a cat      of beam 1  ───────▶  1  -1.3  a cat     parent 1
                       4  -1.4  the dog    of beam 0  ───────▶  2  -1.4  the dog   parent 0
                       5  -1.9  the </s>   of beam 0  ── ✗ dropped: ended, but not among the k best

The engine does with memory what the paper's Figure 9 shows (section 4.4): beam 1 is forked, since two beams continue
it; beam 2 has no child and is freed. Fork, append and free are all it takes, and nothing here knows of blocks.

The rules are those of transformers:

*  The k best proposals that do not end run on, so a beam that ends never makes the search narrower.
*  A proposal that ends is a finished hypothesis if it ranks among the k best; otherwise it is dropped. With the last
   token that is allowed every proposal ends.
*  A hypothesis scores sum / length ** length_penalty. The length counts generated tokens, the end of sequence too. The
   k best hypotheses are kept, and they are the answer.
*  The search is over once k hypotheses are finished and `early_stopping` says that this is enough: True, always;
   False, if the best running sum, scored at its present length, beats none of them; "never", if it would beat none
   even at the length that flatters it most.
*  One beam is greedy search, so its first end is the end, whatever `early_stopping` says.
*  Equals stand in the order of their parents, then of their token ids; an earlier hypothesis stands before a later one.

vLLM differs twice: it divides by the whole length, prompt included, and an end of sequence beyond rank k counts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Literal, NamedTuple

from minipaged.decoding.stopping import FinishReason
from minipaged.step import TokenLogprob


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What shapes one beam search, resolved to plain numbers. Fixed for the request's life."""

    beam_width: int  # k
    max_tokens: int  # of output, at least 1: what was asked for, or what the context leaves
    eos_token_ids: tuple[int, ...] = ()  # empty with ignore_eos
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def num_candidates(self) -> int:
        """How many of its best tokens each beam proposes. However many of them end, k remain that do not."""
        return max(2, 1 + len(self.eos_token_ids)) * self.beam_width

    def score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / length**self.length_penalty


class Beam(NamedTuple):
    """A sequence that runs on."""

    token_ids: tuple[int, ...]  # generated so far
    cumulative_logprob: float
    parent: int  # the index, among the beams one step earlier, of the one that it continues by token_ids[-1]


class Hypothesis(NamedTuple):
    """A sequence that is finished."""

    token_ids: tuple[int, ...]  # generated; the end of sequence that ended it included
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class BeamState:
    """Between two steps. A search begins as `BeamState()`: one beam, the prompt, that has generated nothing."""

    running: tuple[Beam, ...] = (Beam((), 0.0, 0),)  # best first; at most k
    finished: tuple[Hypothesis, ...] = ()  # best first; at most k

    @property
    def is_over(self) -> bool:
        return not self.running


def advance(state: BeamState, candidates: Sequence[Sequence[TokenLogprob]], rules: BeamRules) -> BeamState:
    """The state after one step. `candidates[i]` are the `rules.num_candidates` best tokens of running beam i.

    The verdict on memory is in the new running beams: each is its `parent` with one more token. A parent with several
    children is forked, one without is freed. When the search is over, nothing runs and `finished` is the answer.

    Where the candidates are fewer than k (a tiny vocabulary) fewer beams run, until there are more again.
    """
    proposals = _proposals(state.running, candidates, rules.num_candidates)
    ended = [beam for beam in proposals[: rules.beam_width] if _finish_reason(beam, rules)]
    running = [beam for beam in proposals if not _finish_reason(beam, rules)][: rules.beam_width]
    finished = _with_ended(state.finished, ended, rules)
    return BeamState(() if _is_enough(running, finished, rules) else tuple(running), finished)


def cut_off(state: BeamState, rules: BeamRules) -> BeamState:
    """End a search that is not over where it stands, after a step or more (memory has run out, say).

    Its running beams become hypotheses, by "length". Ties aside, the answer is that of a search whose `max_tokens` had
    been the length reached.
    """
    return BeamState((), _with_ended(state.finished, state.running, rules))


def _proposals(running: Sequence[Beam], candidates: Sequence[Sequence[TokenLogprob]], count: int) -> list[Beam]:
    """The `count` best continuations of all beams, best first; equals by parent, then by token id."""
    ranked = nsmallest(
        count,
        (
            (-(beam.cumulative_logprob + candidate.logprob), parent, candidate.token_id)
            for parent, (beam, proposed) in enumerate(zip(running, candidates, strict=True))
            for candidate in proposed
        ),
    )
    return [Beam((*running[parent].token_ids, token_id), -negated, parent) for negated, parent, token_id in ranked]


def _finish_reason(beam: Beam, rules: BeamRules) -> FinishReason | None:
    if beam.token_ids[-1] in rules.eos_token_ids:
        return "stop"
    return "length" if len(beam.token_ids) == rules.max_tokens else None


def _with_ended(finished: Sequence[Hypothesis], ended: Iterable[Beam], rules: BeamRules) -> tuple[Hypothesis, ...]:
    """The k best hypotheses, best first. Equals stay in order, so an earlier one is not displaced by its equal."""
    new = (_hypothesis(beam, rules) for beam in ended)
    return tuple(sorted((*finished, *new), key=lambda hypothesis: -hypothesis.score)[: rules.beam_width])


def _hypothesis(beam: Beam, rules: BeamRules) -> Hypothesis:
    score = rules.score(beam.cumulative_logprob, len(beam.token_ids))
    reason = _finish_reason(beam, rules) or "length"  # a beam that was cut off has no reason of its own
    return Hypothesis(beam.token_ids, beam.cumulative_logprob, score, reason)


def _is_enough(running: Sequence[Beam], finished: Sequence[Hypothesis], rules: BeamRules) -> bool:
    """Whether no running beam is worth following any further."""
    if not running or len(finished) < rules.beam_width:
        return False
    if rules.early_stopping is True or rules.beam_width == 1:
        return True
    leader = running[0]
    flatters_length = rules.early_stopping == "never" and rules.length_penalty > 0
    length = rules.max_tokens if flatters_length else len(leader.token_ids)
    return rules.score(leader.cumulative_logprob, length) <= finished[-1].score
