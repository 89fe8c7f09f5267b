"""What a request's rules do to its logits before anything is drawn: steps 1 to 6 of the order that vLLM keeps.

    allowed ids → bad words → min_tokens │ logit_bias │ repetition penalty → frequency and presence penalties
    └───────────── masks: −∞ ───────────┘ └── added ─┘ └────────── of the tokens seen so far ──────────────┘

Only rows with such a rule are touched, one at a time, and only at the tokens that the rule names; most rows have none.

Rules can contradict each other. Where bad words and min_tokens leave no token at all, both give way for that draw and
`allowed_token_ids` stands: a request with `allowed_token_ids=[7]` that also bans token 7 gets token 7. So at least one
token is always left, and no softmax ever meets a row of −∞.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.step import Sample


def apply_rules(logits: Tensor, requests: Sequence[Sample]) -> Tensor:
    """Masks, bias and penalties, row by row. logits [R, V] -> [R, V]: a copy, or `logits` itself if no row has any."""
    shaped = logits
    for row, request in enumerate(requests):
        rules, banned = request.rules, banned_token_ids(request)
        if not (banned or rules.allowed_token_ids or rules.logit_bias or rules.reads_history):
            continue
        if shaped is logits:
            shaped = logits.clone()
        _mask(shaped[row], rules.allowed_token_ids, banned)
        _add_bias(shaped[row], rules.logit_bias)
        _penalise(shaped[row], request)
    return shaped


def banned_token_ids(request: Sample) -> set[int]:
    """The tokens that bad words and min_tokens forbid at this place.

    A bad word's last token is forbidden where the tokens before it are the last of the output. As in vLLM the prompt
    does not count: a prompt that ends in "New" does not forbid the "York" of the bad word "New York".
    """
    rules, output = request.rules, request.output_token_ids
    banned = {word[-1] for word in rules.bad_words if output[max(0, len(output) - len(word) + 1) :] == word[:-1]}
    _, position = request.draws[0]  # all draws of a row stand at the same output position
    if position < rules.min_tokens:
        banned.update(rules.end_token_ids)
    return banned


def _mask(row: Tensor, allowed: tuple[int, ...] | None, banned: set[int]) -> None:
    """row [V], in place."""
    if allowed is not None:
        kept = [token_id for token_id in allowed if token_id not in banned] or list(allowed)
        values = row[kept]
        row.fill_(-torch.inf)
        row[kept] = values
    elif banned and len(banned) < len(row):
        row[list(banned)] = -torch.inf


def _add_bias(row: Tensor, logit_bias: tuple[tuple[int, float], ...]) -> None:
    """row [V], in place."""
    if logit_bias:
        token_ids, biases = zip(*logit_bias, strict=True)
        row[list(token_ids)] += row.new_tensor(biases)


def _penalise(row: Tensor, request: Sample) -> None:
    """row [V], in place. S is the number of different tokens seen so far."""
    rules, prompt, output = request.rules, request.prompt_token_ids, request.output_token_ids
    seen, place = torch.tensor(prompt + output, dtype=torch.int64, device=row.device).unique(return_inverse=True)
    count = torch.bincount(place[len(prompt) :], minlength=len(seen)).double()  # [S]: in the output
    before = row[seen].double()  # [S]
    repetition = rules.repetition_penalty
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= rules.frequency_penalty * count + rules.presence_penalty * (count > 0).double()
    # A penalty of 1e300 is allowed: what it drives out of range stays finite, so that only masks are infinite.
    limit = torch.finfo(row.dtype).max
    row[seen] = after.clamp(-limit, limit).where(before > -torch.inf, before).to(row.dtype)
