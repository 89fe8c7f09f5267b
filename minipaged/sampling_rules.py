"""What a request asks of the distribution that its tokens are drawn from, as the plan carries it: plain integers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """What shapes a request's distribution, resolved to token ids. Fixed for the request's life, so it is shared."""

    temperature: float = 1.0  # 0.0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[
        tuple[int, ...], ...
    ] = ()  # each a token sequence whose last token is masked where it would complete
    min_tokens: int = 0  # end_token_ids are masked while fewer output tokens than this exist
    end_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None  # None: no log-probability; k: the drawn token's and the k best; -1: all

    @property
    def reads_history(self) -> bool:
        """Whether a draw depends on the tokens before it other than through the model (so the plan must carry them)."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.bad_words)
