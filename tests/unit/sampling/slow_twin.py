"""The sampler once more, in plain Python and one token at a time: what the fast one must agree with.

The order is vLLM's: allowed ids, bad words, min_tokens, logit_bias, repetition penalty, frequency and presence
penalties, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minipaged.step import Sample

WORD = 2**64


def splitmix64_outputs(seed: int, count: int) -> list[int]:
    """The generator as it was published: a counter that moves by a constant, and a scrambler."""
    outputs = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) % WORD
        z = seed
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
        outputs.append(z ^ (z >> 31))
    return outputs


def random_bits(seed: int, position: int, token_id: int) -> int:
    (scrambled,) = splitmix64_outputs(seed % WORD, 1)
    (key,) = splitmix64_outputs((scrambled + position - 0x9E3779B97F4A7C15) % WORD, 1)
    return splitmix64_outputs(key, token_id + 1)[token_id] >> 11


def gumbel(seed: int, position: int, token_id: int) -> float:
    return -math.log(-math.log((random_bits(seed, position, token_id) | 1) / 2**53))


def processed_logits(logits: Sequence[float], request: Sample) -> list[float]:
    """Steps 1 to 6."""
    rules, output = request.rules, list(request.output_token_ids)
    history = list(request.prompt_token_ids) + output
    banned = set()
    for word in rules.bad_words:
        for token_id in range(len(logits)):
            if tuple(output + [token_id])[-len(word) :] == word:
                banned.add(token_id)
    if request.draws[0][1] < rules.min_tokens:
        banned |= set(rules.end_token_ids)
    allowed = set(range(len(logits)) if rules.allowed_token_ids is None else rules.allowed_token_ids)
    left = allowed - banned or allowed

    result = []
    for token_id, logit in enumerate(logits):
        logit += dict(rules.logit_bias).get(token_id, 0.0)
        if token_id in history:
            logit = logit / rules.repetition_penalty if logit > 0 else logit * rules.repetition_penalty
        logit -= rules.frequency_penalty * output.count(token_id)
        if token_id in output:
            logit -= rules.presence_penalty
        result.append(logit if token_id in left else -math.inf)
    return result


def distribution(logits: Sequence[float], request: Sample) -> tuple[dict[int, float], float]:
    """Steps 1 to 9: the probability of each token that can be drawn, and how near the filters were to another set."""
    rules = request.rules
    logits = processed_logits(logits, request)
    best = max(logits)
    weights = {v: math.exp((x - best) / rules.temperature) for v, x in enumerate(logits) if x > -math.inf}
    margin = min(abs(weight - rules.min_p) for weight in weights.values()) if rules.min_p < 1 else 1.0
    weights = {v: weight for v, weight in weights.items() if weight >= rules.min_p}
    order = sorted(weights, key=lambda v: (-logits[v], v))
    if rules.top_k > 0:
        order = order[: rules.top_k]
    if rules.top_p < 1:
        mass = math.fsum(weights[v] for v in order)
        before = [math.fsum(weights[u] for u in order[:i]) / mass for i in range(len(order))]
        margin = min([margin] + [abs(share - rules.top_p) for share in before])
        order = [v for v, share in zip(order, before, strict=True) if share < rules.top_p]
    mass = math.fsum(weights[v] for v in order)
    return {v: weights[v] / mass for v in order}, margin
