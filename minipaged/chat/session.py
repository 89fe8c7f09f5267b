"""A chat session: a message goes in, its answer streams out, and the conversation goes on from its tokens."""

from __future__ import annotations

from rich.console import Console

from minipaged.beam_search_params import BeamSearchParams
from minipaged.chat.streams import PlainStream, Stream, WatchedStream
from minipaged.engine.conversation import Conversation, Turn
from minipaged.engine.interrupt import deferred_interrupt
from minipaged.engine.llm_engine import LLMEngine
from minipaged.errors import UnsupportedModel
from minipaged.metrics import EngineCounts
from minipaged.outputs import RequestOutput
from minipaged.sampling_params import SamplingParams
from minipaged.snapshot import Snapshot
from minipaged.step import StepPlan, StepResult


class ChatSession:
    """One conversation over one engine. `out` shows answers, `notes` everything else."""

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, system: str | None, out: Console, notes: Console
    ) -> None:
        self.engine = engine
        self.params = params
        self.out = out
        self.notes = notes
        if not engine.tokenizer.has_chat_template:
            raise UnsupportedModel(
                "chat template", None, "the model has none, so it cannot chat; LLM.generate takes prompts"
            )
        context = min(engine.worker.max_model_len, engine.blocks.num_blocks * engine.blocks.block_size)
        room = min(params.max_tokens or context, context // 2)
        self.conversation = Conversation(engine.tokenizer, context, room, system)
        self.last: RequestOutput | None = None
        self.fullest: Snapshot | None = None  # of the last answer, the moment with the most tokens in the cache
        self.watches = False  # whether answers stream over a picture of the pool
        self.counts_before: EngineCounts | None = None  # what the engine had counted when the last answer began
        self.num_evicted = 0  # cached blocks that the last answer displaced
        self._moment: Snapshot | None = None
        self._num_turns = 0
        engine.on_step = self._watch

    def say(self, text: str) -> None:
        """A word to the user that is not part of an answer."""
        self.notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True, emoji=False)

    def answer(self, message: str) -> None:
        """Stream the answer to one message. Ctrl-C ends the answer; what was said until then stays."""
        turn = self._ask(message)
        completion = None
        stream = WatchedStream(self.out) if self.watches else PlainStream(self.out)
        try:
            self.last = self._run(turn.token_ids, self.params, stream)
            [completion] = self.last.outputs
        finally:
            stream.close()
            if completion is not None and completion.token_ids:
                self.conversation.answered(completion.text, completion.token_ids)
            else:
                self.conversation.take_back()
        self._explain_end(self.last)

    def ask_aside(self, message: str, params: SamplingParams | BeamSearchParams) -> RequestOutput:
        """Answer a message in its place in the conversation, which stays as it was before."""
        turn = self._ask(message)
        try:
            self.last = self._run(turn.token_ids, params)
        finally:
            self.conversation.take_back()
        return self.last

    def _ask(self, message: str) -> Turn:
        turn = self.conversation.ask(message)
        if turn.num_forgotten:
            self.say(
                f"(the conversation outgrew the context of {self.conversation.context} tokens: "
                f"its oldest {turn.num_forgotten} exchange(s) are forgotten)"
            )
        return turn

    def _run(
        self, prompt: list[int], params: SamplingParams | BeamSearchParams, stream: Stream | None = None
    ) -> RequestOutput:
        """Step until the answer has ended; each step's part of it goes to the stream. Ctrl-C ends it between steps."""
        self.fullest, self.num_evicted = None, 0
        self.counts_before = self.engine.get_metrics().counts
        self._num_turns += 1
        request_id = f"turn-{self._num_turns}"
        try:
            self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            with deferred_interrupt(self.engine.interruptible) as interrupt:
                while True:
                    if interrupt.is_set:
                        self.engine.abort_request(request_id)
                    for output in self.engine.step():
                        if output.request_id == request_id and stream is not None:
                            stream.show(output, self._moment)
                        if output.request_id == request_id and output.finished:
                            return output
        finally:
            self.engine.abort_request(request_id)

    def _explain_end(self, output: RequestOutput) -> None:
        [completion] = output.outputs
        if completion.finish_reason == "length":
            count = len(completion.token_ids)
            by_choice = count == self.params.max_tokens
            reason = "--max-tokens sets how long an answer may be" if by_choice else "the context is full"
            self.say(f"(cut after {count} tokens: {reason})")
        elif completion.finish_reason == "abort":
            self.say("(stopped)")
        elif completion.finish_reason == "error":
            self.say(f"(the step failed: {output.error!r})")

    def _watch(self, plan: StepPlan, result: StepResult, snapshot: Snapshot) -> None:
        self._moment = snapshot
        self.num_evicted += sum(event.kind == "evict" for event in snapshot.events)
        if self.fullest is None or snapshot.num_filled >= self.fullest.num_filled:
            self.fullest = snapshot
