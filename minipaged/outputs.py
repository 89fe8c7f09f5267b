"""What a request gives back. The names are vLLM's, so that a script written for it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from minipaged.beam_search_params import BeamSearchParams
from minipaged.metrics import RequestMetrics
from minipaged.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the raw logits; rank 1 is the most probable token of its position."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer, complete or so far.

    finish_reason   None while it runs; "stop", "length", "abort" or "error"
    stop_reason     with "stop": the stop string or stop token id that ended it; None where the end-of-sequence did
    logprobs        for each output token, the log-probabilities of itself and of the most probable ones, by token id
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """One result of LLM.beam_search. Tokens and text begin with the prompt's, as vLLM's do."""

    tokens: list[int]
    text: str | None
    cum_logprob: float
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The results for one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestOutput:
    """A request's answers. `prompt_logprobs[0]` is None, since nothing comes before the first token.

    `error` is the exception that ended the request where finish_reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    sampling_params: SamplingParams | BeamSearchParams
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: BaseException | None = field(default=None, repr=False)
