"""Which tokens can still be drawn: steps 7 to 9 of vLLM's order (temperature, min_p, top_k, top_p), without sorting V.

Both functions end in a short list of candidates per row, over which one token is then drawn (`sampler.py`):

    survivors    rows with min_p, top_k or top_p: those that the filters leave
    contenders   rows without: those that can still win, given the row's noise

Neither changes the outcome: what is left out was filtered, or could not have won.

Shapes: R rows, V the vocabulary, C candidates (as many as the fullest row has; the others end in −∞).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.sampling_rules import SamplingRules
from minipaged.worker.logprobs import pack, pack_best_first
from minipaged.worker.noise import gumbel, random_bits

_NEAR = 8.0  # scaled logits this close to the best always count as contenders; any value is exact, this one is quick


def scale(logits: Tensor, rules: Sequence[SamplingRules]) -> Tensor:
    """Temperature. logits [R, V] -> [R, V], each row's largest moved to 0, so that no temperature can overflow it."""
    largest = torch.finfo(logits.dtype).max  # a hotter one would become infinite, and −∞ / ∞ is NaN
    temperature = logits.new_tensor([min(rule.temperature, largest) for rule in rules])[:, None]  # [R, 1]
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature)


def has_filter(rules: SamplingRules) -> bool:
    return rules.min_p > 0 or rules.top_k > 0 or rules.top_p < 1


def survivors(scaled: Tensor, rules: Sequence[SamplingRules]) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p leave of each row, best first; what they drop is −∞. Of equals, the lowest ids stay.

    scaled [R, V] (largest 0) -> values [R, C], token ids [R, C].
    """
    vocab_size = scaled.shape[-1]
    limits = [min(rule.top_k, vocab_size) or vocab_size for rule in rules]
    top_k = torch.tensor(limits, device=scaled.device)[:, None]  # [R, 1]
    top_p = scaled.new_tensor([rule.top_p for rule in rules], dtype=torch.float64)[:, None]  # [R, 1]
    bound = scaled.new_tensor([rule.min_p for rule in rules])[:, None]  # [R, 1]: smaller weights are dropped

    weights = scaled.exp()  # [R, V]: each probability as a share of the best one's
    limited = top_k < vocab_size
    if smaller := [limit for limit in limits if limit < vocab_size]:
        largest = weights.topk(max(smaller)).values
        last = largest.gather(-1, top_k.clamp(max=max(smaller)) - 1)  # [R, 1]: the top_k-th largest weight
        bound = torch.maximum(bound, last.where(limited, 0))
    weights = weights.where(weights >= bound, 0)
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64)  # [R, 1]
    spare = mass * (1 - top_p)  # [R, 1]
    tail = _tail_bound(weights, spare.where(~limited, 0))  # rows with top_k are short already

    values, token_ids = pack_best_first(scaled, weights > tail)
    kept = values.double().exp()  # [R, C]
    kept[torch.arange(kept.shape[-1], device=kept.device) >= top_k] = 0  # those equals, and all later ones
    mass = kept.sum(-1, keepdim=True).where(limited, mass)
    before = kept.cumsum(-1) - kept  # [R, C]: what the more probable ones hold together
    kept[(before >= top_p * mass) & (top_p < 1)] = 0
    return values.masked_fill_(kept == 0, -torch.inf), token_ids


def _tail_bound(weights: Tensor, spare: Tensor) -> Tensor:
    """A weight per row up to which all tokens together hold less than `spare`, so that top_p needs none of them.

    weights [R, V], spare [R, 1] float64 -> [R, 1]. Any such weight is right; a larger one makes the sort shorter.
    """
    bound = spare / (2 * weights.shape[-1])
    if spare.any():
        for weight in (1e-4, 1e-3, 1e-2):
            held = weights.where(weights <= weight, 0).sum(-1, keepdim=True)
            bound = bound.where(held > spare * 0.999, weight)  # with room for rounding
    return bound.to(weights.dtype)


def contenders(scaled: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each row that can win once noise is added: exact, and it spares nearly all of the logarithms.

    scaled [R, V] (largest 0), seeds [R], positions [R] -> values [R, C], token ids [R, C].

    The winner's sum is at least that of the best token, `floor`. A token more than _NEAR below the best reaches it only
    with noise above floor + _NEAR, which one hash in some thousands gives; and comparing hashes takes no logarithm.
    """
    best = scaled.argmax(-1, keepdim=True)  # [R, 1]
    floor = gumbel(seeds, positions, best)  # [R, 1]
    needed = torch.exp(-torch.exp(-(floor + _NEAR))) * 2.0**53 - 4  # as bits; the 4 are for rounding
    bits = random_bits(seeds, positions, torch.arange(scaled.shape[-1], device=scaled.device))  # [R, V]
    return pack(scaled, (scaled > -_NEAR) | (bits > needed.long()))
