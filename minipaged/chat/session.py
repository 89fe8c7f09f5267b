"""A chat session: a message goes in, its answer streams out, and the conversation goes on from its tokens."""

from __future__ import annotations

from rich.console import Console

from minipaged.engine.conversation import Conversation
from minipaged.engine.interrupt import deferred_interrupt
from minipaged.engine.llm_engine import LLMEngine
from minipaged.outputs import RequestOutput
from minipaged.sampling_params import SamplingParams
from minipaged.step import Snapshot, StepPlan, StepResult


class ChatSession:
    """One conversation over one engine. `out` shows answers, `notes` everything else."""

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, system: str | None, out: Console, notes: Console
    ) -> None:
        self.engine = engine
        self.params = params
        self.out = out
        self.notes = notes
        max_model_len = engine.worker.max_model_len
        room = min(params.max_tokens or max_model_len, max_model_len // 2)
        self.conversation = Conversation(engine.tokenizer, max_model_len, room, system)
        self.last: RequestOutput | None = None
        self.fullest: Snapshot | None = None  # of the last answer, the moment with the most tokens in the cache
        self._num_turns = 0
        engine.on_step = self._watch

    def say(self, text: str) -> None:
        """A word to the user that is not part of an answer."""
        self.notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def answer(self, message: str) -> None:
        """Stream the answer to one message. Ctrl-C ends the answer; what was said until then stays."""
        turn = self.conversation.ask(message)
        if turn.num_forgotten:
            self.say(
                f"(the conversation outgrew the context of {self.conversation.max_model_len} tokens: "
                f"its oldest {turn.num_forgotten} exchange(s) are forgotten)"
            )
        self.fullest = None
        self._num_turns += 1
        request_id = f"turn-{self._num_turns}"
        completion = None
        try:
            self.engine.add_request(request_id, {"prompt_token_ids": turn.token_ids}, self.params)
            self.last = self._stream(request_id)
            [completion] = self.last.outputs
        finally:
            self.engine.abort_request(request_id)
            if completion is not None and completion.token_ids:
                self.conversation.answered(completion.text, completion.token_ids)
            else:
                self.conversation.take_back()
        self._explain_end(self.last)

    def _stream(self, request_id: str) -> RequestOutput:
        """Step until the answer has ended, and print what each step adds to it."""
        num_shown = 0
        with deferred_interrupt() as interrupt:
            while True:
                if interrupt.is_set:
                    self.engine.abort_request(request_id)
                for output in self.engine.step():
                    if output.request_id != request_id:
                        continue
                    text = output.outputs[0].text
                    self.out.print(text[num_shown:], end="", markup=False, highlight=False, soft_wrap=True)
                    self.out.file.flush()
                    num_shown = len(text)
                    if output.finished:
                        self.out.print()
                        return output

    def _explain_end(self, output: RequestOutput) -> None:
        [completion] = output.outputs
        if completion.finish_reason == "length":
            self.say(f"(cut after {len(completion.token_ids)} tokens; --max-tokens sets how long an answer may be)")
        elif completion.finish_reason == "abort":
            self.say("(stopped)")
        elif completion.finish_reason == "error":
            self.say(f"(the step failed: {output.error!r})")

    def _watch(self, plan: StepPlan, result: StepResult, snapshot: Snapshot) -> None:
        if self.fullest is None or snapshot.num_filled >= self.fullest.num_filled:
            self.fullest = snapshot
