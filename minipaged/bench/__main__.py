"""Measurements: throughput, sharing, preemption (recompute or swap), control (plain Python alone), ranks (traffic)."""

from __future__ import annotations

import argparse
import sys

from minipaged.bench import control_plane, preemption, ranks, sharing, throughput
from minipaged.errors import MinipagedError
from minipaged.show import Trace, output_path

MEASUREMENTS = {
    "throughput": throughput.measure,
    "sharing": sharing.measure,
    "preemption": preemption.measure,
    "control": control_plane.measure,
    "ranks": ranks.measure,
}
TRACED = {"throughput": throughput.measure, "sharing": sharing.measure}


def main(arguments: list[str] | None = None) -> int:
    """Run one measurement; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minipaged.bench", description=__doc__)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--model", help="directory, hub id or GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--swap-space", type=float, default=1.0, help="preemption: GiB of host memory")
    parser.add_argument("--tensor-parallel-size", type=int, help="ranks (default: 1; for the measurement ranks: 3)")
    parser.add_argument("--requests", type=int, default=64, help="throughput and ranks: how many")
    parser.add_argument("--repeats", type=int, default=3, help="throughput: how often")
    parser.add_argument("--workload", help="throughput: a JSON file of requests instead of random ones")
    parser.add_argument("--peer", choices=["hf"], help="throughput: measure transformers in turn with ours")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=output_path,
        help="throughput and sharing: write all steps as a page for a browser; this takes time that is measured",
    )
    args = parser.parse_args(arguments)
    if args.trace and args.measurement not in TRACED:
        parser.error(f"--trace is for {' and '.join(TRACED)}: the others do not serve requests over one engine")
    trace = Trace(f"bench {args.measurement}") if args.trace else None
    try:
        if trace is None:
            MEASUREMENTS[args.measurement](args)
        else:
            TRACED[args.measurement](args, trace)
            trace.save(args.trace)
    except MinipagedError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
