"""A request from arrival to its last output: the prompt, the wishes, the scheduled group, the answers so far."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from minipaged.beam_search_params import BeamSearchParams
from minipaged.engine.answer import Answer, logprob_dict
from minipaged.engine.prompts import ParsedPrompt
from minipaged.metrics import RequestMetrics
from minipaged.outputs import CompletionOutput, Logprob, RequestOutput
from minipaged.sampling_params import SamplingParams
from minipaged.scheduling.group import SequenceGroup
from minipaged.scheduling.scheduler import Scheduler
from minipaged.scheduling.sequence import Sequence
from minipaged.step import Draw, ScoredToken
from minipaged.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class Request(ABC):
    """What sampling and beam search have in common."""

    prompt: ParsedPrompt
    params: SamplingParams | BeamSearchParams
    group: SequenceGroup
    tokenizer: Tokenizer | None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: BaseException | None = None
    prompt_token_ids: list[int] = field(init=False)  # one list for all outputs: they come with every step

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(self.prompt.token_ids)

    @property
    def request_id(self) -> str:
        return self.group.request_id

    @abstractmethod
    def end(self, reason: str) -> None:
        """Ended from outside (abort, error, no room): whatever has ended before keeps its own reason."""

    @abstractmethod
    def completions(self) -> list[CompletionOutput]:
        """The answers that the user sees now."""

    def output(self) -> RequestOutput:
        """What the user sees now."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self.completions(),
            finished=not self.group.live,
            metrics=self.metrics,
            sampling_params=self.params,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            num_cached_tokens=self.group.num_cached_tokens or 0,
            error=self.error,
        )


@dataclass(slots=True, kw_only=True)
class SamplingRequest(Request):
    """Sampling, greedy included. `answers[i]` belongs to `group.sequences[i]`."""

    params: SamplingParams
    answers: list[Answer]

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def add_prompt_scores(self, scored: tuple[ScoredToken, ...]) -> None:
        """The next prompt positions' log-probabilities; chunks come in order and each position once."""
        self.prompt_logprobs += [logprob_dict(*entry, self.tokenizer) for entry in scored]
        self.group.num_scored += len(scored)

    def append_draws(
        self, seq: Sequence, draws: tuple[Draw, ...], scheduler: Scheduler, seq_ids: itertools.count
    ) -> None:
        """Several draws from one row are a group's first ones: each sample gets a sequence, forked before any ends."""
        children = [scheduler.fork(self.group, seq, next(seq_ids), seq.seed + i) for i in range(1, len(draws))]
        for member, draw in zip([seq, *children], draws, strict=True):
            member.append(draw.token_id)
            answer = self.answers[self.group.sequences.index(member)]
            answer.append(draw)
            if answer.finish_reason is not None:
                scheduler.finish(member, self.group, answer.finish_reason)

    def end(self, reason: str) -> None:
        for answer in self.answers:
            answer.end(reason)

    def completions(self) -> list[CompletionOutput]:
        """Of more samples than the user wants, the most probable ones, best first, once that is known."""
        answers = self.answers
        if len(answers) > self.params.n and not self.group.live:
            answers = sorted(answers, key=lambda answer: -answer.cumulative_logprob)
        return [answer.output(index) for index, answer in enumerate(answers[: self.params.n])]
