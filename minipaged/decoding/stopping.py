"""When does a sequence end? One pure function of the token just appended and the request's limits.

    token appended ──▶ end of sequence?   ──▶ "stop", stop_reason None   ┐ only once more than
                       stop token id?     ──▶ "stop", stop_reason the id ┘ min_tokens tokens exist
                       context is full?   ──▶ "length"
                       max_tokens reached? ─▶ "length"

The order is vLLM's, and it matters: an end-of-sequence that is also the last token allowed is a "stop". Stop *strings*
are no token's property, so they are found after detokenising (`text/stop_window.py`).

A token counts as one of the output tokens as soon as it is appended. With min_tokens = m the first m tokens never end
a sequence, so the earliest end-of-sequence is token m + 1; the sampler masks the ending tokens until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class StopLimits:
    """What may end one request, resolved to plain integers. `ignore_eos` ignores eos_token_ids, not stop_token_ids."""

    max_model_len: int  # prompt and output together
    max_tokens: int | None = None  # output tokens; None: up to the context
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether and why a sequence has ended: finish_reason is None while it runs on.

    stop_reason is the stop token's id, or None where the end of sequence or a length ended it.
    """

    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


RUNS_ON = Verdict()


def check_stop(token_id: int, num_output_tokens: int, num_total_tokens: int, limits: StopLimits) -> Verdict:
    """The verdict on a sequence whose newest token is `token_id`; both counts include that token."""
    if num_output_tokens > limits.min_tokens:
        if token_id in limits.eos_token_ids and not limits.ignore_eos:
            return Verdict("stop")
        if token_id in limits.stop_token_ids:
            return Verdict("stop", stop_reason=token_id)
    if num_total_tokens >= limits.max_model_len:
        return Verdict("length")
    if limits.max_tokens is not None and num_output_tokens >= limits.max_tokens:
        return Verdict("length")
    return RUNS_ON
