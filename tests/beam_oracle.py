"""Beam search the long way: whole token lists, every continuation, float64. What minipaged's beam search must equal.

    result = beam_search(lambda tokens: [...], width=4, max_tokens=8, eos=(2,))

`logprobs(tokens)` gives the log-probability of every token of the vocabulary after the generated `tokens`. The rules
are those of transformers' `generate(num_beams=width, num_return_sequences=width)`, and tests/parity/test_beam_oracle.py
holds them against it. Equal sums keep the order in which they are listed here: beam by beam, token id by token id.

A result also says how close its decisions were: transformers computes in float32, so where two sums or scores that were
compared differ by less than that can resolve, it may rightly decide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple


class Found(NamedTuple):
    score: float
    total: float  # summed log-probability
    tokens: list[int]
    reason: str  # "stop" or "length"


class BeamResult(NamedTuple):
    found: list[Found]  # best first
    smallest_gap: float  # between any two sums or scores whose order decided something
    ended_inside: int  # how often an end of sequence stood among the `width` best of a step
    ended_outside: int  # how often one stood among the other continuations looked at


def beam_search(
    logprobs: Callable[[list[int]], Sequence[float]],
    width: int,
    max_tokens: int,
    eos: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> BeamResult:
    running: list[tuple[list[int], float]] = [([], 0.0)]
    found: list[Found] = []
    gaps = [inf]
    ended_inside = ended_outside = 0

    for length in range(1, max_tokens + 1):
        # Every continuation of every beam; of those the best ones are looked at.
        continuations = [
            (tokens + [token_id], total + logprob)
            for tokens, total in running
            for token_id, logprob in enumerate(logprobs(tokens))
        ]
        continuations.sort(key=lambda continuation: -continuation[1])
        looked_at = continuations[: max(2, 1 + len(eos)) * width]
        is_eos = [tokens[-1] in eos for tokens, _ in looked_at]
        ended_inside += sum(is_eos[:width])
        ended_outside += sum(is_eos[width:])

        # Those that end can be found if they are among the `width` best. The best of the others run on.
        is_last = length == max_tokens
        new = [
            Found(total / length**length_penalty, total, tokens, "stop" if tokens[-1] in eos else "length")
            for tokens, total in looked_at[:width]
            if is_last or tokens[-1] in eos
        ]
        if is_last or any(is_eos[: width + 1]):
            gaps.append(gap_at(width, [total for _, total in looked_at]))
        others = [] if is_last else [c for c, ended in zip(looked_at, is_eos, strict=True) if not ended]
        gaps.append(gap_at(width, [total for _, total in others]))
        running = others[:width]

        # The best found so far are kept.
        merged = sorted(found + new, key=lambda one: -one.score)
        gaps.append(gap_at(width, [one.score for one in merged]))
        found = merged[:width]

        # Is it over?
        if not running:
            break
        if len(found) == width:
            if early_stopping is True or width == 1:  # one beam is greedy search
                break
            longest = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            attainable = running[0][1] / longest**length_penalty
            gaps.append(abs(attainable - found[-1].score))
            if attainable <= found[-1].score:
                break

    gaps += [better.score - worse.score for better, worse in zip(found, found[1:], strict=False)]
    return BeamResult(found, min(gaps), ended_inside, ended_outside)


def gap_at(cut: int, descending: Sequence[float]) -> float:
    """How far the first one left out is behind the last one kept."""
    return descending[cut - 1] - descending[cut] if len(descending) > cut else inf
