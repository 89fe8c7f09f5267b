"""How a request wants its tokens drawn: vLLM's `SamplingParams`, checked once, when it is made.

Every field has a row in `_CHECKS`: the type, what is allowed in words, and the test. A value that fails raises
`InvalidParameter`, which names the field, the value and those words. What passes is kept in one normal form (a single
stop string becomes a list, `top_k=-1` becomes 0, NumPy's scalars become Python's), so that no later code asks again.

Like vLLM's, the object can be changed after it was made, and such a change is not checked. An engine therefore takes
its own copy with `dataclasses.replace(params)`, which runs every check again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Integral
from typing import Any

from minipaged.checks import Check, check_fields, flag, integer, number, optional, refuse_unknown
from minipaged.errors import InvalidParameter

GREEDY_TEMPERATURE = 1e-5  # below it, the most probable token is taken and nothing is drawn


def _list(allowed: str, test: Callable[[Any], bool]) -> Callable[[str, Any], list]:
    """A list, tuple or set whose members all pass; each member is kept once, in the order given."""

    def check(field: str, value: Any) -> list:
        if not isinstance(value, list | tuple | set | frozenset) or not all(map(test, value)):
            raise InvalidParameter(field, value, allowed)
        return list(dict.fromkeys(value))

    return check


def _is_text(value: Any) -> bool:
    """Non-empty, and valid Unicode: half a surrogate pair is in no tokenizer's text."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 0


def _token_ids(field: str, value: Any) -> list[int]:
    check = _list("must be a list of token ids (integers from 0)", _is_token_id)
    return [int(token_id) for token_id in check(field, value)]


def _stop(field: str, value: Any) -> list[str]:
    value = [value] if isinstance(value, str) else value
    return _list("must be a non-empty string, or a list of them", _is_text)(field, value)


def _allowed_token_ids(field: str, value: Any) -> list[int]:
    token_ids = _token_ids(field, value)
    if not token_ids:
        raise InvalidParameter(field, value, "must name at least one token id, or be None for all of them")
    return token_ids


def _logit_bias(field: str, value: Any) -> dict[int, float]:
    """Keys may be strings of integers: JSON has no others."""
    allowed = "must map each token id (an integer from 0, or a string of one) once to a number from -100 to 100"
    if not isinstance(value, Mapping):
        raise InvalidParameter(field, value, allowed)
    bias = {}
    for key, added in value.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        if not _is_token_id(token_id) or token_id in bias:
            raise InvalidParameter(field, value, allowed)
        bias[int(token_id)] = number(allowed, lambda v: -100 <= v <= 100)(field, added)
    return bias


_COUNT = integer("must be an integer, at least 1", lambda v: v >= 1)
_PENALTY = number("must be a number from -2 to 2", lambda v: -2 <= v <= 2)
_NUM_LOGPROBS = optional(integer("must be an integer from 0, -1 for all, or None for none", lambda v: v >= -1))

_CHECKS: dict[str, Check] = {
    "n": _COUNT,
    "best_of": optional(_COUNT),
    "temperature": number("must be a finite number, at least 0", lambda v: 0 <= v < inf),
    "top_p": number("must be a number above 0, at most 1", lambda v: 0 < v <= 1),
    "top_k": integer("must be an integer from 1, or 0 (or -1) for no limit", lambda v: v >= -1),
    "min_p": number("must be a number from 0 to 1", lambda v: 0 <= v <= 1),
    "repetition_penalty": number("must be a finite number above 0", lambda v: 0 < v < inf),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "seed": optional(integer("must be an integer of 64 bits, or None", lambda v: -(2**63) <= v < 2**64)),
    "max_tokens": optional(integer("must be an integer, at least 1, or None for up to the context", lambda v: v >= 1)),
    "min_tokens": integer("must be an integer, at least 0", lambda v: v >= 0),
    "ignore_eos": flag,
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": flag,
    "bad_words": _list("must be a list of non-empty strings", _is_text),
    "allowed_token_ids": optional(_allowed_token_ids),
    "logit_bias": optional(_logit_bias),
    "logprobs": _NUM_LOGPROBS,
    "prompt_logprobs": _NUM_LOGPROBS,
    "detokenize": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
}

_OF_BEAM_SEARCH = frozenset({"early_stopping", "length_penalty", "use_beam_search"})
_NOT_SUPPORTED = frozenset(
    """extra_args flat_logprobs guided_decoding logits_processors
    logprob_token_ids output_kind prompt_logprob_start prompt_logprob_token_ids repetition_detection
    skip_reading_prefix_cache stream_interval structured_outputs thinking_token_budget
    truncate_prompt_tokens""".split()  # noqa: SIM905
)


@dataclass(kw_only=True)
class SamplingParams:
    """One request's wishes, by vLLM's names and defaults. Raises `InvalidParameter` for a value that is not allowed."""

    n: int = 1  # how many outputs
    best_of: int | None = None  # how many are drawn, the n best of which are returned; None: n
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # draw from the fewest tokens that together have this probability
    top_k: int = 0  # draw from this many tokens at most; 0 (or -1): no limit
    min_p: float = 0.0  # draw from tokens with at least this share of the best one's probability
    repetition_penalty: float = 1.0  # over prompt and output: logits are divided (if negative, multiplied) by it
    frequency_penalty: float = 0.0  # over the output: subtracted once for each occurrence
    presence_penalty: float = 0.0  # over the output: subtracted once
    seed: int | None = None  # output i draws with seed + i; None (or, as in vLLM, -1): the engine chooses
    max_tokens: int | None = 16  # None: up to the context
    min_tokens: int = 0  # no end-of-sequence and no stop token before this many
    ignore_eos: bool = False
    stop: str | list[str] | None = None  # strings that end the output
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None  # strings that are never completed
    allowed_token_ids: list[int] | None = None  # None: all
    logit_bias: dict[int, float] | None = None  # token id -> what is added to its logit
    logprobs: int | None = None  # log-probabilities of the drawn token and of this many of the best; -1: all
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __new__(cls, **given: Any) -> SamplingParams:
        """Refuse, by name, the fields that vLLM has and minipaged does not."""
        for field in sorted(_OF_BEAM_SEARCH & given.keys()):
            raise InvalidParameter(
                field, given[field], "is beam search's: LLM.beam_search(prompts, BeamSearchParams(…))"
            )
        for field in sorted(_NOT_SUPPORTED & given.keys()):
            raise InvalidParameter(field, given[field], "is vLLM's, and minipaged does not support it")
        refuse_unknown(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, field) is None:
                setattr(self, field, [])
        check_fields(self, _CHECKS)
        self.top_k = max(self.top_k, 0)
        self.seed = None if self.seed == -1 else self.seed
        self._check_together()

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameter("best_of", self.best_of, f"must be at least n = {self.n}")
        if self.is_greedy and self.num_samples > 1:
            field = "n" if self.n > 1 else "best_of"
            raise InvalidParameter(field, getattr(self, field), "must be 1 at temperature 0: all would be the same")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"must be at most max_tokens = {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise InvalidParameter(
                "stop", self.stop, "needs detokenize = True: stop strings are looked for in the text"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_samples(self) -> int:
        """How many sequences the request runs: `best_of`, or `n` where that is not given."""
        return self.n if self.best_of is None else self.best_of
