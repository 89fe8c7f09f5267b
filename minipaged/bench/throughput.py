"""Tokens per second over a batch of requests: eager, compiled and peers, measured by turns in the same run."""

from __future__ import annotations

from minipaged.bench.contestants import Contestants, contestants, median_speed, modes_of
from minipaged.bench.report import Report
from minipaged.bench.roofs import gflop, gflops
from minipaged.bench.workload import Workload, load_workload, num_tokens_in, num_tokens_out
from minipaged.errors import InvalidParameter
from minipaged.snapshot import OnStep


def measure(args, on_step: OnStep | None = None) -> list[Report]:
    """Each of ours and the peers, `--repeats` times.

    Raises:
        InvalidParameter: a trace is of one engine, and there are two of ours.
    """
    if on_step is not None and len(modes_of(args)) > 1:
        raise InvalidParameter("trace", str(args.trace), "it shows one engine: choose one of --modes eager, compiled")
    with contestants(args, args.dtype, on_step) as found:
        return [serve(found, load_workload(args, found.worker.config.vocab_size), args.repeats)]


def serve(found: Contestants, workload: Workload, repeats: int) -> Report:
    """One row for each contestant; `tokens_per_s` is the median."""
    worker, num_out = found.worker, num_tokens_out(workload)
    measured = {name: seconds for name, (seconds,) in found.by_turns([workload], repeats).items()}
    flops = gflop(worker.config, num_tokens_in(workload) + num_out, num_sampled=num_out)
    compute = gflops(worker.dtype)
    speeds = {name: median_speed(workload, seconds) for name, seconds in measured.items()}
    report = Report(f"{len(workload)} requests, {num_out:,} tokens out; {found.describe()}")
    for name, speed in speeds.items():
        report.add(
            who=name,
            tokens_per_s=speed,
            all_runs=[num_out / seconds for seconds in measured[name]],
            times_the_last_row=speed / list(speeds.values())[-1],
            of_the_roof=f"{flops * speed / num_out / compute:.0%}",
        )
    report.notes.append(f"roof: {compute:,.0f} GFLOP/s in a product of two 2048 × 2048; the work: {flops:,.0f} GFLOP")
    return report
