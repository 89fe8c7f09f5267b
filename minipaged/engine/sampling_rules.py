"""From SamplingParams to the SamplingRules that travel in the plan: strings become token ids, ids are checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from minipaged.sampling_rules import SamplingRules
from minipaged.text.tokenizer import Tokenizer


def resolve_rules(
    params: SamplingParams, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...], vocab_size: int
) -> SamplingRules:
    """Raises InvalidParameter for a token id that the model has not, and for words where there is no tokenizer."""
    for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_token_ids(field, getattr(params, field) or (), vocab_size)
    for field in ("stop", "bad_words"):
        if getattr(params, field) and tokenizer is None:
            raise InvalidParameter(field, getattr(params, field), "needs a tokenizer (skip_tokenizer_init is True)")
    return SamplingRules(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=tuple((params.logit_bias or {}).items()),
        allowed_token_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        bad_words=_tokenize_words(params.bad_words, tokenizer, vocab_size),
        min_tokens=params.min_tokens,
        end_token_ids=tuple(dict.fromkeys([*eos_token_ids, *params.stop_token_ids])),
        num_logprobs=params.logprobs,
    )


def derive_seed(engine_seed: int, number: int) -> int:
    """The seed of a request that came without one, equal in every run with this engine seed and order of requests."""
    digest = hashlib.blake2b(f"{engine_seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidParameter(field, token_id, f"token ids of this model end at {vocab_size - 1}")


def _tokenize_words(words: list[str], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text and after a space, since those are other tokens."""
    encoded: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelling in (word, " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            _check_token_ids("bad_words", token_ids, vocab_size)
            encoded[token_ids] = None
    return tuple(token_ids for token_ids in encoded if token_ids)
