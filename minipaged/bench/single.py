"""One request alone: the time to its first token, and tokens per second, each against the machine's roof.

A prefill is arithmetic: its roof is a large matrix product. A decode alone reads every weight for one token: its roof
is the speed of memory.
"""

from __future__ import annotations

import statistics

from minipaged.bench.contestants import Contestants, contestants, median_speed
from minipaged.bench.report import Report
from minipaged.bench.roofs import gbytes_per_second, gflop, gflops, weights_read
from minipaged.bench.workload import random_request, read_workload
from minipaged.errors import InvalidParameter

NUM_PROMPT, NUM_OUTPUT = 512, 128


def measure(args) -> list[Report]:
    """Each of ours and the peers, `--repeats` times."""
    with contestants(args, args.dtype) as found:
        request = read_workload(args.workload)[0] if args.workload is not None else None
        return [serve_alone(found, request, args.repeats)]


def serve_alone(found: Contestants, request: dict | None, repeats: int) -> Report:
    """Prefill a long prompt; then stream an answer to `request` (without one: to the same prompt)."""
    worker, config = found.worker, found.worker.config
    room = worker.max_model_len - NUM_OUTPUT
    long = random_request(min(NUM_PROMPT, max(room, 0)), 1, config.vocab_size)
    stream = {**(request or long), "max_tokens": NUM_OUTPUT}
    if room < max(1, len(stream["prompt_token_ids"])):
        raise InvalidParameter("max_model_len", worker.max_model_len, f"holds no prompt and {NUM_OUTPUT} tokens more")
    scenes = [[long], [{**stream, "max_tokens": 1}], [stream]]
    compute, memory = gflops(worker.dtype), gbytes_per_second()
    num_prompt, num_before = len(long["prompt_token_ids"]), len(stream["prompt_token_ids"])
    flops = gflop(config, num_prompt, num_sampled=1)
    gbytes = weights_read(config) * worker.dtype.itemsize / 1e9
    report = Report(
        f"one request alone: {num_prompt} tokens in; then {num_before} in, {NUM_OUTPUT} out; {found.describe()}"
    )
    for name, measured in found.by_turns(scenes, repeats).items():
        first, begin, whole = map(statistics.median, measured)
        decoded = (NUM_OUTPUT - 1) / (whole - begin)  # tokens per second
        report.add(
            who=name,
            first_token_s=first,
            prefill_GFLOPs=flops / first,
            of_the_roof=f"{flops / first / compute:.0%}",
            tokens_per_s=median_speed([stream], measured[2]),
            weights_GB_per_s=gbytes * decoded,
            of_that_roof=f"{gbytes * decoded / memory:.0%}",
        )
    report.notes.append(f"first token: of the {num_prompt}. tokens per s: of the {NUM_OUTPUT} out, with their prefill")
    report.notes.append("weights GB per s: of the decode alone, each token reads all of them")
    report.notes.append(f"roofs: {compute:,.0f} GFLOP/s in a product of two 2048 × 2048, {memory:.1f} GB/s read")
    return report
