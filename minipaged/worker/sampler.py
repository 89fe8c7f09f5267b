"""Logits to tokens, for a whole batch. A token is a function of its distribution and of (seed, output position) alone.

    raw logits ─┬─▶ rules (logits.py) ─┬─ greedy ──────────────────────▶ argmax
                │                      └─▶ candidates (candidates.py) ──▶ argmax(logit / T + noise)
                └─▶ log-probabilities (logprobs.py): of the raw logits, before any rule

The second argmax is the Gumbel-max trick (noise.py): adding noise and taking the largest *is* drawing from the softmax.
A token's noise does not depend on the other tokens, so a filter can take some away without touching the rest.

Rows are told apart by what they need, and no row pays for another's rules.

Shapes: R requests, D draws, V the vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.sampling_params import GREEDY_TEMPERATURE
from minipaged.sampling_rules import SamplingRules
from minipaged.step import Draw, Sample, ScoredToken
from minipaged.worker.candidates import contenders, has_filter, scale, survivors
from minipaged.worker.logits import apply_rules
from minipaged.worker.logprobs import at_least_float32, rows_per_chunk, score_tokens
from minipaged.worker.noise import gumbel


def sample(logits: Tensor, requests: Sequence[Sample]) -> list[tuple[Draw, ...]]:
    """Draw the tokens that each request asks for. logits [R, V] of any float type, row i belongs to requests[i]."""
    logits = at_least_float32(logits)
    rows = [row for row, request in enumerate(requests) for _ in request.draws]  # [D]: the row of each draw
    draws = [draw for request in requests for draw in request.draws]  # [D]: (seed, output position)
    rules = [requests[row].rules for row in rows]
    token_ids = _draw_tokens(apply_rules(logits, requests), rows, draws, rules)
    scores = _score_draws(logits, rows, token_ids, [_num_logprobs(requests[row]) for row in rows])

    results: list[list[Draw]] = [[] for _ in requests]
    for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        target, best = scores.get(index, (None, ()))
        results[row].append(Draw(token_id, target, best))
    return [tuple(result) for result in results]


def _draw_tokens(
    logits: Tensor, rows: list[int], draws: list[tuple[int, int]], rules: list[SamplingRules]
) -> list[int]:
    """One token for each draw. logits [R, V], rules applied; rows, draws and rules are lists of D."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, rule in enumerate(rules):
        kind = "greedy" if rule.temperature < GREEDY_TEMPERATURE else "filtered" if has_filter(rule) else "plain"
        groups[kind].append(index)

    token_ids = [0] * len(rows)
    step = rows_per_chunk(logits.shape[-1])
    for kind, members in groups.items():
        size = len(members) if kind == "greedy" else step
        for start in range(0, len(members), size):
            part = members[start : start + size]
            picked = _take_rows(logits, [rows[index] for index in part])
            if kind == "greedy":
                drawn = _most_probable(picked)
            else:
                drawn = _draw_random(picked, [draws[index] for index in part], [rules[index] for index in part])
            for index, token_id in zip(part, drawn.tolist(), strict=True):
                token_ids[index] = token_id
    return token_ids


def _most_probable(logits: Tensor) -> Tensor:
    """logits.argmax(-1), the lowest id of equals: [R, V] -> [R]. Of stripes first, then within the winning one.

    Torch looks for a place one number after another, for a maximum at many at once. 64 rows of 49,152 on one core:
    argmax alone 5.7 ms, in stripes of 256 0.7 ms, of a step of 150 (bfloat16, compiled).
    """
    stripes = logits.unflatten(1, (-1, math.gcd(logits.shape[1], 256)))  # [R, V / 256, 256]; odd vocabularies: of 1
    best = stripes.amax(-1).argmax(-1)  # [R]
    within = stripes[torch.arange(len(logits), device=logits.device), best].argmax(-1)  # [R]
    return best * stripes.shape[2] + within


def _take_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """logits[rows], without a copy where that is all of it in order."""
    return logits if rows == list(range(len(logits))) else logits[rows]


def _draw_random(logits: Tensor, draws: list[tuple[int, int]], rules: list[SamplingRules]) -> Tensor:
    """logits [D, V] -> token ids [D]. Either all of the rules filter, or none."""
    # seed + i of a request's sample i may pass 2^63: it wraps, as all arithmetic of the noise does.
    seeds = torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed, _ in draws], device=logits.device)  # [D]
    positions = torch.tensor([position for _, position in draws], device=logits.device)  # [D]
    scaled = scale(logits, rules)
    if has_filter(rules[0]):
        values, token_ids = survivors(scaled, rules)  # each [D, C]
    else:
        values, token_ids = contenders(scaled, seeds, positions)
    winner = (values + gumbel(seeds, positions, token_ids)).argmax(-1, keepdim=True)  # [D, 1], summed in float64
    return token_ids.gather(-1, winner)[:, 0]


def _num_logprobs(request: Sample) -> int | None:
    """How many of the best tokens to list beside the drawn one; None: not even that one's log-probability is wanted."""
    if request.rules.num_logprobs is None and request.needs_logprob:
        return 0
    return request.rules.num_logprobs


def _score_draws(
    logits: Tensor, rows: list[int], token_ids: list[int], wanted: list[int | None]
) -> dict[int, ScoredToken]:
    """Log-probabilities by index of the draw, of those that want them. logits [R, V], raw."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, num_logprobs in enumerate(wanted):
        if num_logprobs is not None:
            groups[num_logprobs].append(index)
    scores: dict[int, ScoredToken] = {}
    for num_logprobs, part in groups.items():
        picked = _take_rows(logits, [rows[index] for index in part])
        targets = [token_ids[index] for index in part]
        scores.update(zip(part, score_tokens(picked, targets, num_logprobs), strict=True))
    return scores
