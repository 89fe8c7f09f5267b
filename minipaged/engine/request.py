"""A request from arrival to its last output: the prompt, the wishes, the scheduled group, the answers so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from minipaged.engine.answer import Answer, logprob_dict
from minipaged.engine.prompts import ParsedPrompt
from minipaged.outputs import Logprob, RequestMetrics, RequestOutput
from minipaged.sampling_params import SamplingParams
from minipaged.scheduling.group import SequenceGroup
from minipaged.step import ScoredToken
from minipaged.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Request:
    """`answers[i]` belongs to `group.sequences[i]`."""

    prompt: ParsedPrompt
    params: SamplingParams
    group: SequenceGroup
    answers: list[Answer]
    tokenizer: Tokenizer | None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    error: BaseException | None = None

    @property
    def request_id(self) -> str:
        return self.group.request_id

    def add_prompt_scores(self, scored: tuple[ScoredToken, ...]) -> None:
        """The next prompt positions' log-probabilities; chunks come in order and each position once."""
        self.prompt_logprobs += [logprob_dict(*entry, self.tokenizer) for entry in scored]
        self.group.num_scored += len(scored)

    def end(self, reason: str, error: BaseException | None = None) -> None:
        """Ended from outside; answers that ended before keep their own reason."""
        self.error = error
        for answer in self.answers:
            answer.end(reason)

    def _best_answers(self) -> list[Answer]:
        """The n that the user sees: of more samples than that the most probable ones, best first."""
        if len(self.answers) == self.params.n:
            return self.answers
        return sorted(self.answers, key=lambda answer: -answer.cumulative_logprob)[: self.params.n]

    def output(self) -> RequestOutput:
        """What the user sees now."""
        finished = all(answer.finish_reason is not None for answer in self.answers)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=[answer.output(index) for index, answer in enumerate(self._best_answers())],
            finished=finished,
            metrics=self.metrics,
            sampling_params=self.params,
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
            num_cached_tokens=self.group.num_cached_tokens or 0,
            error=self.error,
        )
