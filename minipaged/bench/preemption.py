"""Recompute against swap: what it costs to put a request out and to bring it back, over block sizes.

The shape of the paper's Figure 19a. Swapping moves the request's blocks to host memory and back, a small block at a
time; recomputing is one prefill of all its tokens, whatever the block size. On a CPU both pools lie in the same memory,
so swapping is cheap here; over a PCIe bus small blocks make it slow.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from minipaged.bench.report import Report
from minipaged.engine.llm import LLM
from minipaged.errors import InvalidParameter
from minipaged.step import Sample, SamplingRules, SequenceWork, StepPlan
from minipaged.worker.worker import Worker

NUM_TOKENS = 512  # of the request
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_REPEATS = 3


def _seconds(worker: Worker, plan: StepPlan) -> float:
    def run() -> float:
        begin = time.perf_counter()
        worker.execute(plan)
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)
        return time.perf_counter() - begin

    return _median(run)


def _median(run: Callable[[], float]) -> float:
    run()  # warm up
    return statistics.median(run() for _ in range(NUM_REPEATS))


def measure(args: argparse.Namespace) -> list[Report]:
    """A request's blocks lie scattered over the pool, as they do after a while."""
    report = Report("")
    for block_size in BLOCK_SIZES:
        count = NUM_TOKENS // block_size
        llm = LLM(
            args.model,
            dtype=args.dtype,
            block_size=block_size,
            max_model_len=NUM_TOKENS,
            num_gpu_blocks_override=4 * count,
            preemption_mode="swap",
            swap_space=args.swap_space,
        )
        worker = llm.llm_engine.worker
        if worker.num_host_blocks < count:
            raise InvalidParameter("swap_space", args.swap_space, f"has no room for a request of {NUM_TOKENS} tokens")
        rng = random.Random(block_size)
        device = tuple(rng.sample(range(4 * count), count))
        host = tuple(rng.sample(range(min(4 * count, worker.num_host_blocks)), count))
        prefill = SequenceWork(0, (1,) * NUM_TOKENS, 0, device, 0)
        draw = Sample(0, ((0, 0),), SamplingRules(temperature=0.0))
        recompute = _seconds(worker, StepPlan(0, (prefill,), (draw,)))
        out = _seconds(worker, StepPlan(0, (), (), swap_out=tuple(zip(device, host, strict=True))))
        back = _seconds(worker, StepPlan(0, (), (), swap_in=tuple(zip(host, device, strict=True))))
        report.add(
            block_size=block_size,
            recompute=recompute * 1e3,
            swap_out=out * 1e3,
            swap_in=back * 1e3,
            recompute_is=f"{recompute / (out + back):.0f} × out and in",
        )
    where = f"{worker.path.name} on {worker.device}"
    report.title = f"{where}: preempting a request of {NUM_TOKENS} tokens, ms (median of {NUM_REPEATS})"
    return [report]
