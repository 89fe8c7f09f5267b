"""The most probable tokens, best first, and log-probabilities under the raw logits.

`topk` alone will not do: it may return equal logits in any order, and at the k-th place any of several equals. Here
equals come in the order of their ids, on every device. So `topk` finds only the k-th largest *value*; all tokens from
there up are packed to the left, in the order of their ids, and sorted by a sort that keeps equals in place:

    logits      0.1  2.0  0.5  2.0  0.5     k = 3: the third largest value is 0.5
    kept              1    2    3    4      their ids, packed
    best first        1    3    2    4      sorted; the first k are 1, 3, 2

Shapes: R rows, V the vocabulary, C columns of a packed matrix (as many as its fullest row needs).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.step import ScoredToken, ScorePrompt, TokenLogprob

CHUNK = 2**19  # elements of a row-wise pass that are worked on at once: temporaries stay in the processor's cache


def rows_per_chunk(vocab_size: int) -> int:
    return max(1, CHUNK // vocab_size)


def pack(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Move the kept tokens of each row to its left, in the order of their ids; the rest of the row is filled with −∞.

    x [R, V], keep [R, V] bool -> values [R, C], token ids [R, C] int64.
    """
    rows, token_ids = keep.nonzero(as_tuple=True)  # each [N]
    counts = torch.bincount(rows, minlength=len(x))  # [R]
    columns = torch.arange(len(rows), device=x.device) - (counts.cumsum(0) - counts)[rows]  # [N]
    packed = token_ids.new_zeros(len(x), int(counts.max()))  # [R, C]
    packed[rows, columns] = token_ids
    values = torch.full_like(packed, -torch.inf, dtype=x.dtype)  # [R, C]
    values[rows, columns] = x[rows, token_ids]
    return values, packed


def pack_best_first(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """As `pack`, with each row in falling order; equals in the order of their ids."""
    values, token_ids = pack(x, keep)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(-1, order)


def best_tokens(logits: Tensor, k: int) -> list[tuple[TokenLogprob, ...]]:
    """The min(k, V) most probable tokens of each row, best first, equals by lowest id. logits [R, V]; k = -1: all."""
    k = logits.shape[-1] if k == -1 else min(k, logits.shape[-1])
    if k == 0:
        return [()] * len(logits)
    values, token_ids = pack_best_first(logits, logits >= logits.topk(k).values[:, -1:])
    values, token_ids = values[:, :k], token_ids[:, :k]
    ranks = torch.searchsorted(-values, -values) + 1  # [R, k]: equals share the rank of the first of them
    logprobs = values - logits.logsumexp(-1, keepdim=True)
    lists = zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [tuple(map(TokenLogprob, *row)) for row in lists]


def best_candidates(logits: Tensor, ks: Sequence[int]) -> list[tuple[TokenLogprob, ...]]:
    """For `step.BestCandidates`: the ks[i] most probable tokens of row i, best first. logits [R, V]."""
    logits = at_least_float32(logits)
    return [best_tokens(logits[row : row + 1], k)[0] for row, k in enumerate(ks)]


def score_tokens(logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[ScoredToken]:
    """The log-probability of one token of each row, with the most probable ones. logits [R, V], R token ids."""
    scored = []
    step = rows_per_chunk(logits.shape[-1])
    for start in range(0, len(token_ids), step):
        part, targets = logits[start : start + step], token_ids[start : start + step]
        chosen = part.gather(-1, torch.tensor(targets, device=part.device)[:, None])  # [r, 1]
        logprobs = (chosen - part.logsumexp(-1, keepdim=True)).flatten().tolist()
        ranks = ((part > chosen).sum(-1) + 1).tolist()
        target = map(TokenLogprob, targets, logprobs, ranks)
        scored.extend(map(ScoredToken, target, best_tokens(part, num_logprobs)))
    return scored


def score_prompt(logits: Tensor, item: ScorePrompt) -> tuple[ScoredToken, ...]:
    """For `step.ScorePrompt`: target i under row i. logits [n, V]; rows after the last target are not looked at."""
    logits = at_least_float32(logits[: len(item.targets)])
    return tuple(score_tokens(logits, item.targets, item.num_logprobs))


def at_least_float32(logits: Tensor) -> Tensor:
    """Half types are widened; float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
