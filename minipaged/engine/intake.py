"""The door: everything about a request is checked here, before anything is queued, and turned into what runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from minipaged.decoding.stopping import StopLimits
from minipaged.engine.answer import Answer
from minipaged.engine.prompts import PromptLimits, parse_prompt
from minipaged.engine.request import Request
from minipaged.engine.sampling_rules import derive_seed, resolve_rules
from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from minipaged.scheduling.group import SamplingRequest, SequenceGroup
from minipaged.scheduling.sequence import Sequence
from minipaged.text.tokenizer import Tokenizer


class Intake:
    """Makes requests. `engine_seed` gives a seed to those that come without one."""

    def __init__(
        self, tokenizer: Tokenizer | None, limits: PromptLimits, eos_token_ids: tuple[int, ...], engine_seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._engine_seed = engine_seed

    def make_request(self, request_id: str, number: int, prompt: Any, params: Any) -> Request:
        """Raises InvalidPrompt or InvalidParameter, naming the field, for anything that could not run to its end."""
        params = _checked_copy(params)
        rules = resolve_rules(params, self._tokenizer, self._eos_token_ids, self._limits.vocab_size)
        parsed = parse_prompt(prompt, self._tokenizer, self._limits)
        seed = derive_seed(self._engine_seed, number) if params.seed is None else params.seed
        group = SequenceGroup(
            request_id,
            number,
            [Sequence(number, parsed.token_ids, seed)],
            SamplingRequest(rules, num_prompt_logprobs=params.prompt_logprobs),
        )
        answer = Answer(0, params, self._stop_limits(params), parsed.token_ids, self._tokenizer)
        return Request(parsed, params, group, [answer], self._tokenizer)

    def _stop_limits(self, params: SamplingParams) -> StopLimits:
        return StopLimits(
            max_model_len=self._limits.max_model_len,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
        )


def _checked_copy(params: Any) -> SamplingParams:
    """A copy of our own, checked again: the user's object may have been changed since it was made, and may be later."""
    if not isinstance(params, SamplingParams):
        raise InvalidParameter("sampling_params", params, "must be SamplingParams")
    if params.num_samples > 1:
        field = "n" if params.n > 1 else "best_of"
        raise InvalidParameter(field, getattr(params, field), "must be 1: parallel sampling is not supported yet")
    return dataclasses.replace(params)
