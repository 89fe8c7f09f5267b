"""The door: everything about a request is checked here, before anything is queued, and turned into what runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from minipaged.beam_search_params import BeamSearchParams
from minipaged.blocks.block_table import blocks_for
from minipaged.decoding.beam_search import BeamRules
from minipaged.decoding.stopping import StopLimits
from minipaged.engine.answer import Answer
from minipaged.engine.beam_request import BeamRequest
from minipaged.engine.prompts import RequestLimits, parse_prompt
from minipaged.engine.request import Request, SamplingRequest
from minipaged.engine.sampling_rules import derive_seed, resolve_rules
from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from minipaged.scheduling.group import GroupSampling, SequenceGroup
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
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise InvalidParameter("sampling_params", params, "must be SamplingParams or BeamSearchParams")
        # A copy of our own, checked again: the user's object may have been changed since it was made, and may be later.
        params = dataclasses.replace(params)
        make = self._make_sampling if isinstance(params, SamplingParams) else self._make_beam_search
        return make(request_id, number, seq_id, prompt, params)

    def _make_sampling(
        self, request_id: str, number: int, seq_id: int, prompt: Any, params: SamplingParams
    ) -> SamplingRequest:
        rules = resolve_rules(params, self._tokenizer, self._eos_token_ids, self._limits.vocab_size)
        parsed = parse_prompt(prompt, self._tokenizer, self._limits)
        field = "n" if params.best_of is None else "best_of"
        self._check_fits(field, params.num_samples, len(parsed.token_ids), params.max_tokens)
        seed = derive_seed(self._engine_seed, number) if params.seed is None else params.seed
        sampling = GroupSampling(
            rules,
            num_samples=params.num_samples,
            needs_logprob=params.num_samples > params.n,
            num_prompt_logprobs=params.prompt_logprobs,
            cache_salt=parsed.cache_salt,
        )
        group = SequenceGroup(request_id, number, [Sequence(seq_id, parsed.token_ids, seed)], sampling)
        limits = self._stop_limits(params)
        answers = [Answer(params, limits, parsed.token_ids, self._tokenizer) for _ in range(params.num_samples)]
        return SamplingRequest(prompt=parsed, params=params, group=group, tokenizer=self._tokenizer, answers=answers)

    def _make_beam_search(
        self, request_id: str, number: int, seq_id: int, prompt: Any, params: BeamSearchParams
    ) -> BeamRequest:
        parsed = parse_prompt(prompt, self._tokenizer, self._limits)
        self._check_fits("beam_width", params.beam_width, len(parsed.token_ids), params.max_tokens)
        rules = BeamRules(
            beam_width=params.beam_width,
            max_tokens=min(params.max_tokens, self._limits.max_model_len - len(parsed.token_ids)),
            eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        sampling = GroupSampling(
            num_samples=params.beam_width, num_candidates=rules.num_candidates, cache_salt=parsed.cache_salt
        )
        group = SequenceGroup(request_id, number, [Sequence(seq_id, parsed.token_ids, seed=0)], sampling)
        return BeamRequest(
            prompt=parsed,
            params=params,
            group=group,
            tokenizer=self._tokenizer,
            rules=rules,
            beams=list(group.sequences),
        )

    def _check_fits(self, field: str, width: int, num_tokens: int, max_tokens: int | None) -> None:
        """Refuse more sequences than may run, or than the pool can hold once each has a token of its own."""
        limits = self._limits
        if width > limits.max_num_seqs:
            raise InvalidParameter(field, width, f"must be at most max_num_seqs ({limits.max_num_seqs})")
        needed = self._most_blocks(width, num_tokens, min(2, max_tokens or 2))
        if width > 1 and needed > limits.num_blocks:
            raise InvalidParameter(
                field,
                width,
                f"so many sequences behind a prompt of {num_tokens} tokens need {needed} KV blocks of "
                f"{limits.block_size} tokens from their second token on; the pool has {limits.num_blocks}",
            )

    def max_blocks_needed(self, prompt: Any, params: Any) -> int:
        """The most blocks that the request can hold; raises what make_request would raise."""
        request = self.make_request("", 0, 0, prompt, params)
        return self._most_blocks(
            request.group.sampling.num_samples, len(request.prompt.token_ids), request.params.max_tokens
        )

    def _most_blocks(self, width: int, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The prompt's full blocks are shared; all else each sequence has for itself, up to the last token, which is
        never fed. With a single token to come, the sequences end before they write anything.
        """
        limits = self._limits
        room = limits.max_model_len - num_prompt_tokens
        num_fed = num_prompt_tokens + min(room, room if max_tokens is None else max_tokens) - 1
        whole = blocks_for(num_fed, limits.block_size)
        shared = num_prompt_tokens // limits.block_size
        return whole if num_fed == num_prompt_tokens else shared + width * (whole - shared)

    def _stop_limits(self, params: SamplingParams) -> StopLimits:
        return StopLimits(
            max_model_len=self._limits.max_model_len,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
        )
