"""What the plain-Python half costs: schedule() and update() of one step, without any model.

A worker that computes nothing stands in for the real one. Two tables: the cost over the number of running sequences,
which should grow linearly, and over the length of their contexts, which should not matter. What counts is this thread's
own time, whatever else the machine does; making the outputs that a step returns is part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time

from minipaged.bench.idle_worker import IdleWorker
from minipaged.bench.report import Report
from minipaged.config import ModelConfig
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.sampling_params import SamplingParams

BLOCK_SIZE = 16
NUM_STEPS = 60  # measured ones; none of the requests ends in them


def step_seconds(num_seqs: int, context: int) -> float:
    """The median time of one step in which every sequence decodes."""
    num_blocks = num_seqs * -(-(context + NUM_STEPS + 2) // BLOCK_SIZE)
    worker = IdleWorker(ModelConfig(32_000, 1, 1, 1, 1, 1, 1, 100_000), 100_000, num_blocks)
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
        worker.seconds, begin = 0.0, time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - begin - worker.seconds)
    return statistics.median(seconds)


def measure(args: argparse.Namespace) -> list[Report]:
    """Over the number of sequences, then over their length."""
    by_count = Report("one step of the control plane: sequences of 500 tokens")
    for num_seqs in (32, 64, 128, 256, 512):
        _add(by_count, "sequences", num_seqs, step_seconds(num_seqs, 500), num_seqs)
    by_length = Report("one step of the control plane: 256 sequences")
    for context in (125, 500, 2000):
        _add(by_length, "tokens_each", context, step_seconds(256, context), 256)
    return [by_count, by_length]


def _add(report: Report, varied: str, value: int, seconds: float, num_seqs: int) -> None:
    report.add(**{varied: value}, milliseconds_median=seconds * 1e3, microseconds_each=seconds / num_seqs * 1e6)
