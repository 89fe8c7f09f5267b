"""What the plain-Python half costs: schedule() and update() of one step, without any model.

A worker that computes nothing stands in for the real one. Two tables: the cost over the number of running sequences,
which should grow linearly, and over the length of their contexts, which should not matter.
"""

from __future__ import annotations

import argparse
import statistics
import time

from rich.console import Console
from rich.table import Table

from minipaged.config import ModelConfig
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.sampling_params import SamplingParams
from minipaged.step import Draw, StepPlan, StepResult

BLOCK_SIZE = 16
NUM_STEPS = 60  # measured ones; none of the requests ends in them


class IdleWorker:
    """Answers every plan at once: each draw is token 7. Counts the time that it is asked for, to be left out."""

    def __init__(self, num_blocks: int) -> None:
        self.config = ModelConfig(32_000, 1, 1, 1, 1, 1, 1, 100_000)
        self.max_model_len = 100_000
        self.num_blocks = num_blocks
        self.num_host_blocks = 0
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        result = StepResult(tuple(tuple(Draw(7, None, ()) for _ in entry.draws) for entry in plan.sampling))
        self.seconds += time.perf_counter() - begin
        return result


def step_seconds(num_seqs: int, context: int) -> float:
    """The median time of one step in which every sequence decodes."""
    num_blocks = num_seqs * -(-(context + NUM_STEPS + 2) // BLOCK_SIZE)
    worker = IdleWorker(num_blocks)
    args = EngineArgs(
        block_size=BLOCK_SIZE,
        skip_tokenizer_init=True,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * context,
    )
    engine = LLMEngine(args, worker)
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 2, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request(str(i), {"prompt_token_ids": [i % 1000 + 1] * context}, params)
    engine.step()
    seconds = []
    for _ in range(NUM_STEPS):
        worker.seconds, begin = 0.0, time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin - worker.seconds)
    return statistics.median(seconds)


def measure(args: argparse.Namespace) -> None:
    """Print both tables."""
    console = Console(width=120)
    for title, column, cases in (
        ("sequences of 500 tokens", "sequences", [(n, 500) for n in (32, 64, 128, 256, 512)]),
        ("256 sequences", "tokens each", [(256, n) for n in (125, 500, 2000)]),
    ):
        table = Table(title=f"one step of the control plane: {title}", title_justify="left")
        for name in (column, "ms (median)", "µs for each sequence"):
            table.add_column(name, justify="right")
        for num_seqs, context in cases:
            seconds = step_seconds(num_seqs, context)
            varied = num_seqs if column == "sequences" else context
            table.add_row(str(varied), f"{seconds * 1e3:.2f}", f"{seconds / num_seqs * 1e6:.1f}")
        console.print(table)
