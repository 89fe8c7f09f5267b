"""The scenes: for each mechanism of the paper, a few requests over a pool so small that every step can be looked at.

Blocks have four slots, as in the paper's figures. A scene is plain data: what the engine is built from, and which
request comes at which step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minipaged.beam_search_params import BeamSearchParams
from minipaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A request, and the step before which it comes."""

    step: int
    name: str
    prompt: str
    params: SamplingParams | BeamSearchParams


@dataclass(frozen=True)
class Scene:
    """`free_first` are the blocks that the pool hands out first, in this order."""

    name: str
    title: str
    look: str  # what to look for
    arrivals: tuple[Arrival, ...]
    num_blocks: int = 12
    free_first: tuple[int, ...] = ()
    block_size: int = 4
    args: Mapping[str, Any] = field(default_factory=dict)  # more arguments of LLM

    @property
    def engine_args(self) -> dict[str, Any]:
        """Without a host pool, unless the scene is about it."""
        own = {"block_size": self.block_size, "num_gpu_blocks_override": self.num_blocks, "swap_space": 0}
        return own | dict(self.args)

    @property
    def free_order(self) -> list[int]:
        return [*self.free_first, *(block for block in range(self.num_blocks) if block not in self.free_first)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


TWO_SAMPLES = SamplingParams(n=2, temperature=0.8, top_k=20, max_tokens=4, seed=27, ignore_eos=True)
FOUR_SCORE = "Four score and seven years ago our"  # seven tokens, as in the paper
BEST_OF_TIMES = "It was the best of times"
SYSTEM = "You are a friendly guide. You answer every question in a single short sentence.\n"
A_LONG_PROMPT = (
    "The quick brown fox jumps over the lazy dog, and the dog, who was not as lazy as all that, "
    "got up and ran after the fox until"
)
FOUR_REQUESTS = (
    Arrival(0, "one", FOUR_SCORE, greedy(5)),
    Arrival(0, "two", BEST_OF_TIMES, greedy(5)),
    Arrival(0, "three", "The capital of France is", greedy(5)),
    Arrival(0, "four", "Once upon a time, there", greedy(5)),
)
TWO_TOO_MANY = (  # for a pool of five blocks: each needs three in the end
    Arrival(0, "first", FOUR_SCORE, greedy(6)),
    Arrival(0, "second", BEST_OF_TIMES, greedy(6)),
)

_ALL = (
    Scene(
        "growing",
        "one prompt, growing (Figure 6)",
        "The prompt takes two blocks, 7 and 1; the next token fills block 1; only then is block 3 taken. "
        "Never more than the last block has empty slots.",
        (Arrival(0, "mine", FOUR_SCORE, greedy(4)),),
        num_blocks=8,
        free_first=(7, 1, 3),
    ),
    Scene(
        "two",
        "two requests in one pool (Figure 7)",
        "Their blocks lie between each other wherever there is room; each table keeps its own order.",
        (Arrival(0, "one", FOUR_SCORE, greedy(5)), Arrival(1, "two", BEST_OF_TIMES, greedy(4))),
        num_blocks=8,
        free_first=(7, 1, 5, 2, 3),
    ),
    Scene(
        "parallel",
        "parallel sampling with copy-on-write (Figure 8)",
        "The prompt is computed once and shared (×2). The first to write into the shared last block copies it; "
        "the other is alone by then, and writes in place.",
        (Arrival(0, "mine", FOUR_SCORE, TWO_SAMPLES),),
        num_blocks=8,
        free_first=(7, 1, 3),
    ),
    Scene(
        "beams",
        "beam search (Figure 9)",
        "Beams that go on fork and share; those that are dropped let go of their blocks in the same step.",
        (Arrival(0, "mine", FOUR_SCORE, BeamSearchParams(beam_width=4, max_tokens=7, ignore_eos=True)),),
        num_blocks=24,
    ),
    Scene(
        "prefix",
        "a shared system prompt",
        "Three requests begin alike and come at the same time: the beginning is computed once, in the same step.",
        tuple(
            Arrival(0, name, SYSTEM + question, greedy(3))
            for name, question in (("one", "Who are you?"), ("two", "Where is Paris?"), ("three", "Why is it dark?"))
        ),
        num_blocks=16,
        args={"enable_prefix_caching": True},
    ),
    Scene(
        "recompute",
        "running out of blocks: preemption by recompute",
        "When no block is left, the latest request loses all that it has. It waits, and comes back as one prefill of "
        "its prompt and what it had generated.",
        TWO_TOO_MANY,
        num_blocks=5,
    ),
    Scene(
        "swap",
        "running out of blocks: preemption by swapping",
        "As in the scene before (recompute), but the blocks move to the host pool and back: nothing is computed twice.",
        TWO_TOO_MANY,
        num_blocks=5,
        args={"preemption_mode": "swap", "swap_space": 0.0012},  # six host blocks of the default model
    ),
    Scene(
        "chunked",
        "chunked prefill",
        "A step has room for eight tokens. The long prompt comes in pieces, and the other request goes on beside it.",
        (Arrival(0, "talking", FOUR_SCORE, greedy(8)), Arrival(2, "reading", A_LONG_PROMPT, greedy(2))),
        num_blocks=16,
        args={"max_num_batched_tokens": 8, "max_num_seqs": 4},
    ),
    Scene(
        "eviction",
        "prefix caching, and what it gives up when room is short",
        "What has ended stays in the pool (~) and is found again by who begins alike, until somebody needs the room.",
        (
            Arrival(0, "first", SYSTEM + "Who are you?", greedy(2)),
            Arrival(2, "alike", SYSTEM + "Where is Paris?", greedy(2)),
            Arrival(4, "other", A_LONG_PROMPT, greedy(2)),
            Arrival(6, "again", SYSTEM + "Who are you?", greedy(2)),
        ),
        num_blocks=10,
        args={"enable_prefix_caching": True},
    ),
    Scene(
        "contiguous",
        "before paging: a reservation for the longest answer that may come",
        "One block is a whole context here: 64 slots hold two requests, and most of them stay empty. "
        "Compare `paged`: the same requests, the same 64 slots.",
        FOUR_REQUESTS,
        num_blocks=2,
        block_size=32,
        args={"max_model_len": 32},
    ),
    Scene(
        "paged",
        "the same requests and the same 64 slots, in blocks of four",
        "All four run at once. Compare `contiguous`.",
        FOUR_REQUESTS,
        num_blocks=16,
        args={"max_model_len": 32},
    ),
)
SCENES = {scene.name: scene for scene in _ALL}
