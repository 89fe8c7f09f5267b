"""A sequence group: all the sequences of one request, scheduled, preempted and resumed together (paper, section 4.5).

The state belongs to the group, since its sequences share blocks and must come and go together:

                    admitted                    every sequence ended
         waiting ─────────────▶ running ──────────────────────────────▶ finished
            ▲                    │   ▲
            └──── recompute ─────┤   │  swap in                (abort and errors lead to finished from anywhere)
                        swap out ▼   │
                               swapped
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from minipaged.errors import IllegalTransition
from minipaged.sampling_rules import SamplingRules
from minipaged.scheduling.sequence import Sequence


class GroupState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.WAITING: frozenset({GroupState.RUNNING, GroupState.FINISHED}),
    GroupState.RUNNING: frozenset({GroupState.WAITING, GroupState.SWAPPED, GroupState.FINISHED}),
    GroupState.SWAPPED: frozenset({GroupState.RUNNING, GroupState.WAITING, GroupState.FINISHED}),
    GroupState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class GroupSampling:
    """What the scheduler must know of a request's sampling to write it into the plan."""

    rules: SamplingRules = SamplingRules()
    num_samples: int = 1  # drawn from the prompt's last token, each a sequence of its own from then on; or beams
    num_candidates: int = 0  # > 0: beam search, which draws nothing, and compares so many continuations of each beam
    needs_logprob: bool = False
    num_prompt_logprobs: int | None = None  # None: the prompt is not scored
    cache_salt: str = ""  # only requests with the same one share cached prefixes


class SequenceGroup:
    """One request. `number` is its place in the order of arrival: lower is served first and preempted last."""

    def __init__(
        self, request_id: str, number: int, sequences: list[Sequence], sampling: GroupSampling | None = None
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.sequences = sequences
        self.sampling = sampling or GroupSampling()
        self.num_unforked = self.sampling.num_samples - 1  # how many sequences the first draw will add
        self.num_cached_tokens: int | None = None  # taken from the prefix cache when it first ran
        self.num_scored = 1  # prompt positions whose log-probability is known; nothing comes before the first
        self.state = GroupState.WAITING

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have not finished; the others hold no block and are counted nowhere."""
        return [seq for seq in self.sequences if seq.finish_reason is None]

    @property
    def num_seqs(self) -> int:
        """How many sequences may run at the same time, with those that the first draw or a step of beams will add."""
        return self.sampling.num_samples if self.in_lockstep else len(self.live) + self.num_unforked

    @property
    def in_lockstep(self) -> bool:
        """Beams are compared with each other, so all of them must speak in the same step."""
        return self.sampling.num_candidates > 0

    @property
    def first_to_run(self) -> Sequence:
        """The one that begins: its siblings, if there are any, take their stems from it or from each other."""
        return next(seq for seq in self.live if seq.stem is None)

    @property
    def reads_cache(self) -> bool:
        """Prompt tokens that are still to be scored must be fed, so they cannot come from the prefix cache."""
        return self.sampling.num_prompt_logprobs is None or self.num_scored >= self.sequences[0].num_prompt_tokens

    @property
    def is_prefill(self) -> bool:
        return any(seq.is_prefill for seq in self.live)

    def move_to(self, state: GroupState) -> None:
        """Change the state; raises IllegalTransition where no arrow of the picture above leads there."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.request_id}: no way from {self.state.value} to {state.value}")
        self.state = state

    def __repr__(self) -> str:
        return f"SequenceGroup({self.request_id}: {self.state.value}, {self.sequences})"
