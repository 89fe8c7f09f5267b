"""The door: everything about a request is checked here, before anything is queued, and turned into what runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from minipaged.blocks.block_table import blocks_for
from minipaged.decoding.stopping import StopLimits
from minipaged.engine.answer import Answer
from minipaged.engine.prompts import RequestLimits, parse_prompt
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
        self, tokenizer: Tokenizer | None, limits: RequestLimits, eos_token_ids: tuple[int, ...], engine_seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._engine_seed = engine_seed

    def make_request(self, request_id: str, number: int, seq_id: int, prompt: Any, params: Any) -> Request:
        """Raises InvalidPrompt or InvalidParameter, naming the field, for anything that could not run to its end."""
        params = _checked_copy(params)
        rules = resolve_rules(params, self._tokenizer, self._eos_token_ids, self._limits.vocab_size)
        parsed = parse_prompt(prompt, self._tokenizer, self._limits)
        self._check_fits(len(parsed.token_ids), params)
        seed = derive_seed(self._engine_seed, number) if params.seed is None else params.seed
        group = SequenceGroup(
            request_id,
            number,
            [Sequence(seq_id, parsed.token_ids, seed)],
            SamplingRequest(
                rules,
                num_samples=params.num_samples,
                needs_logprob=params.num_samples > params.n,
                num_prompt_logprobs=params.prompt_logprobs,
                cache_salt=parsed.cache_salt,
            ),
        )
        limits = self._stop_limits(params)
        answers = [Answer(params, limits, parsed.token_ids, self._tokenizer) for _ in range(params.num_samples)]
        return Request(parsed, params, group, answers, self._tokenizer)

    def _check_fits(self, num_tokens: int, params: SamplingParams) -> None:
        """Refuse more samples than may run, or than the pool can hold once each has a token of its own."""
        field, limits = "n" if params.best_of is None else "best_of", self._limits
        if params.num_samples > limits.max_num_seqs:
            allowed = f"must be at most max_num_seqs ({limits.max_num_seqs})"
            raise InvalidParameter(field, params.num_samples, allowed)
        if params.num_samples == 1 or params.max_tokens == 1:
            return
        shared = num_tokens // limits.block_size
        needed = shared + params.num_samples * (blocks_for(num_tokens + 1, limits.block_size) - shared)
        if needed > limits.num_blocks:
            raise InvalidParameter(
                field,
                params.num_samples,
                f"so many samples of a prompt of {num_tokens} tokens need {needed} KV blocks of {limits.block_size} "
                f"tokens from their second token on; the pool has {limits.num_blocks}",
            )

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
    return dataclasses.replace(params)
