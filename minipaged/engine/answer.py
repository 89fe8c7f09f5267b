"""One sequence's answer as a person reads it: its text, its log-probabilities, and the verdict that ends it.

token ──▶ check_stop ──▶ detokenizer ──▶ stop window ──▶ text
          (ends by id       (bytes to       (ends by a stop string,
           or by length)     characters)     holds back what may become one)
"""

from __future__ import annotations

from minipaged.decoding.stopping import StopLimits, Verdict, check_stop
from minipaged.outputs import CompletionOutput, Logprob
from minipaged.sampling_params import SamplingParams
from minipaged.step import Draw, TokenLogprob
from minipaged.text.detokenizer import IncrementalDetokenizer
from minipaged.text.stop_window import StopWindow
from minipaged.text.tokenizer import Tokenizer


class Answer:
    """Collects what one sequence draws. A recompute's old tokens never come here, so nothing counts twice."""

    def __init__(
        self,
        params: SamplingParams,
        limits: StopLimits,
        prompt_token_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._limits = limits
        self._num_prompt_tokens = len(prompt_token_ids)
        self._tokenizer = tokenizer
        self._logprobs: list[dict[int, Logprob]] = []
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        self._stop_window = StopWindow(tuple(params.stop or ()), params.include_stop_str_in_output)

    def append(self, draw: Draw) -> None:
        """Take one drawn token in; `finish_reason` is set where it ends the answer."""
        self.token_ids.append(draw.token_id)
        if draw.logprob is not None:
            self.cumulative_logprob += draw.logprob.logprob
        if self._params.logprobs is not None and draw.logprob is not None:
            self._logprobs.append(logprob_dict(draw.logprob, draw.best, self._tokenizer))
        count = len(self.token_ids)
        verdict = check_stop(draw.token_id, count, self._num_prompt_tokens + count, self._limits)
        stop_string = self._add_text(draw.token_id, verdict)
        if stop_string is not None and verdict.finish_reason != "stop":
            self._end("stop", stop_string)
        elif verdict.finished:
            self._end(verdict.finish_reason, verdict.stop_reason)

    def end(self, reason: str) -> None:
        """Ended from outside: abort, error, or no room to go on."""
        if self.finish_reason is None:
            self._end(reason, None)

    def output(self, index: int) -> CompletionOutput:
        """The answer so far, as a value of its own. `index` is its place among the request's outputs."""
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index,
            self.text,
            list(self.token_ids),
            self.cumulative_logprob if wants_logprobs else None,
            list(self._logprobs) if wants_logprobs else None,
            self.finish_reason,
            self.stop_reason,
        )

    def _add_text(self, token_id: int, verdict: Verdict) -> str | None:
        """The stop string that this token completes, if any. A stop token itself is no text, unless it is asked for."""
        if self._detokenizer is None:
            return None
        if verdict.finish_reason == "stop" and not self._params.include_stop_str_in_output:
            return None
        may_stop = len(self.token_ids) > self._params.min_tokens
        shown = self._stop_window.push(self._detokenizer.append(token_id), may_stop)
        self.text += shown.text
        return shown.stop

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        """What was held back is text after all, unless a stop string ended the answer: then nothing comes after it."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is None or isinstance(stop_reason, str):
            return
        shown = self._stop_window.push(self._detokenizer.finish(), may_stop=False)
        self.text += shown.text + self._stop_window.flush()


def logprob_dict(
    target: TokenLogprob, best: tuple[TokenLogprob, ...], tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """The log-probabilities of one position by token id: the token that stands there first, then the best ones."""
    entries = {entry.token_id: entry for entry in (target, *best)}
    return {
        token_id: Logprob(entry.logprob, entry.rank, None if tokenizer is None else tokenizer.token_text(token_id))
        for token_id, entry in entries.items()
    }
