"""A beam search in the engine: each step's verdict becomes forks, appended tokens and freed blocks (paper, 4.4, 5.2).

beams before    A   B   C         verdict: two children of B, one of A
fork            A   B   C   B'    B' shares all blocks of B; forks come first, since a parent must still be there
append          A+  B+      B'+   each takes its token; the first child goes on in the parent's own sequence
free            A   B       B'    C has no child: its blocks go back in the same step
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from minipaged.beam_search_params import BeamSearchParams
from minipaged.decoding.beam_search import BeamRules, BeamState, Hypothesis, advance, cut_off
from minipaged.engine.request import Request
from minipaged.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from minipaged.scheduling.scheduler import Scheduler
from minipaged.scheduling.sequence import Sequence
from minipaged.step import TokenLogprob
from minipaged.text.detokenizer import IncrementalDetokenizer
from minipaged.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class BeamRequest(Request):
    """`beams[i]` is the sequence of `state.running[i]`. There is nothing to show before the search is over."""

    params: BeamSearchParams
    rules: BeamRules
    state: BeamState = field(default_factory=BeamState)
    beams: list[Sequence]

    def advance(
        self, candidates: Mapping[int, tuple[TokenLogprob, ...]], scheduler: Scheduler, seq_ids: itertools.count
    ) -> None:
        """Apply one step's verdict. `candidates` are the best tokens of each beam, by sequence number."""
        self.state = advance(self.state, [candidates[beam.seq_id] for beam in self.beams], self.rules)
        parents, self.beams = self.beams, []
        for child in self.state.running:
            parent = parents[child.parent]
            taken = any(beam is parent for beam in self.beams)
            self.beams.append(scheduler.fork(self.group, parent, next(seq_ids), parent.seed) if taken else parent)
        for beam, child in zip(self.beams, self.state.running, strict=True):
            beam.append(child.token_ids[-1])
        for parent in parents:
            if not any(beam is parent for beam in self.beams):
                scheduler.finish(parent, self.group, "dropped")
        self.group.sequences = [*self.beams]

    def end(self, reason: str) -> None:
        """Cut the search off where it stands: beams that ran end for the given reason."""
        if self.state.is_over:
            return
        running = {beam.token_ids for beam in self.state.running}
        if running == {()}:  # nothing was generated yet
            self.state = BeamState((), (Hypothesis((), 0.0, 0.0, reason),))
            return
        finished = cut_off(self.state, self.rules).finished
        ended_now = [h._replace(finish_reason=reason) if h.token_ids in running else h for h in finished]
        self.state = BeamState((), tuple(ended_now))

    def completions(self) -> list[CompletionOutput]:
        if not self.state.is_over:
            return []
        return [self._completion(index, hypothesis) for index, hypothesis in enumerate(self.state.finished)]

    def _completion(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        """The tokens include the end of sequence, the text only if that is asked for."""
        shown = list(hypothesis.token_ids)
        if hypothesis.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            shown.pop()
        text = "" if self.tokenizer is None else self._text(shown)
        return CompletionOutput(
            index,
            text,
            list(hypothesis.token_ids),
            hypothesis.cumulative_logprob,
            finish_reason=hypothesis.finish_reason,
        )

    def _text(self, token_ids: list[int]) -> str:
        """The text that the tokens add to the prompt's, which may end inside a character."""
        skip = not self.params.include_stop_str_in_output
        detokenizer = IncrementalDetokenizer(self.tokenizer, self.prompt.token_ids, skip)
        for token_id in token_ids:
            detokenizer.append(token_id)
        detokenizer.finish()
        return detokenizer.text


def beam_search_output(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """A finished beam search as LLM.beam_search returns it; raises what ended it where that was an error."""
    if output.error is not None:
        raise output.error
    sequences = []
    for completion in output.outputs:
        token_ids = completion.token_ids
        if completion.finish_reason == "stop" and not output.sampling_params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # vLLM's results do not show the end of sequence
        tokens = output.prompt_token_ids + token_ids
        text = None if tokenizer is None else tokenizer.decode(tokens)
        sequences.append(BeamSearchSequence(tokens, text, completion.cumulative_logprob, completion.finish_reason))
    return BeamSearchOutput(sequences)
