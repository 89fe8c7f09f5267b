"""One request alone: the time to its first token, and then the tokens per second, each against the machine's roof.

A prefill is arithmetic: its roof is a large matrix product. A decode alone reads every weight for one token: its roof
is the speed of memory.
"""

from __future__ import annotations

import random
import statistics
import time

from minipaged.bench.report import Report
from minipaged.bench.roofs import gbytes_per_second, gflops, weights_read
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams

NUM_PROMPT, NUM_OUTPUT = 512, 64


def measure(args) -> list[Report]:
    """Eager and compiled in turn."""
    modes = {
        name: LLM(args.model, dtype=args.dtype, max_model_len=args.max_model_len, enforce_eager=name == "eager")
        for name in ("eager", "compiled")
    }
    worker = modes["eager"].llm_engine.worker
    config = worker.config
    prompt = random.Random(0).choices(range(1000, config.vocab_size), k=NUM_PROMPT)
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    for repeat in range(args.repeats + 1):
        for name, llm in modes.items():
            times = _run(llm, prompt)
            if repeat > 0:  # the first is a warm-up
                timed[name].append(times)

    compute, memory = gflops(worker.dtype), gbytes_per_second()
    flops = 2 * (weights_read(config) - config.vocab_size * config.hidden_size) * NUM_PROMPT / 1e9
    gbytes = weights_read(config) * worker.dtype.itemsize / 1e9
    report = Report(f"{modes['compiled'].describe()}: one request, {NUM_PROMPT} tokens in, {NUM_OUTPUT} out")
    for name, times in timed.items():
        first, rest = (statistics.median(column) for column in zip(*times, strict=True))
        speed = (NUM_OUTPUT - 1) / rest
        report.add(
            mode=name,
            first_token_s=first,
            prefill_GFLOPs=flops / first,
            of_the_roof=f"{flops / first / compute:.0%}",
            tokens_per_s=speed,
            weights_GB_per_s=gbytes * speed,
            of_that_roof=f"{gbytes * speed / memory:.0%}",
        )
    report.notes.append(f"roofs: {compute:,.0f} GFLOP/s in a product of two 2048 × 2048, {memory:.1f} GB/s read")
    return [report]


def _run(llm: LLM, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and from there to the last."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    begin = time.perf_counter()
    engine.add_request("single", {"prompt_token_ids": prompt}, params)
    engine.step()
    first = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return first - begin, time.perf_counter() - first
