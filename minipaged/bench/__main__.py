"""Measurements that anybody can repeat: `python -m minipaged.bench NAME`.

throughput   tokens per second over a batch of requests, eager and compiled, beside peers (--peer)
single       one request alone: time to the first token, tokens per second, beside peers
compare      both of these in float32 and bfloat16, and one table of the ratios
attention    one layer's decode attention, by backend
memory       KV memory allocated, filled and wasted: paged against reserved in one piece
sharing      what parallel samples and common prefixes save
preemption   recompute against swap, over block sizes
control      the control plane alone: schedule and update, without a model
ranks        what crosses between the ranks of a split model
"""

from __future__ import annotations

import argparse
import sys

from minipaged.bench import attention, compare, control_plane, memory, preemption, ranks, sharing, single, throughput
from minipaged.bench.contestants import MODES
from minipaged.bench.report import write_json
from minipaged.bench.workload import read_workload
from minipaged.errors import MinipagedError
from minipaged.show import Trace, output_path

MEASUREMENTS = {
    "throughput": throughput.measure,
    "single": single.measure,
    "compare": compare.measure,
    "attention": attention.measure,
    "memory": memory.measure,
    "sharing": sharing.measure,
    "preemption": preemption.measure,
    "control": control_plane.measure,
    "ranks": ranks.measure,
}
TRACED = {"throughput": throughput.measure, "sharing": sharing.measure}


def main(arguments: list[str] | None = None) -> int:
    """Run one measurement; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.trace and args.measurement not in TRACED:
        parser.error(f"--trace is for {' and '.join(TRACED)}: the others do not serve requests over one engine")
    trace = Trace(f"bench {args.measurement}") if args.trace else None
    args.modes = list(dict.fromkeys(args.modes))
    try:
        if args.workload:
            read_workload(args.workload)  # refused before anything is loaded
        reports = MEASUREMENTS[args.measurement](args) if trace is None else TRACED[args.measurement](args, trace)
    except MinipagedError as error:
        print(error, file=sys.stderr)
        return 2
    for report in reports:
        report.print()
    if args.json:
        write_json(reports, args.json)
    if trace is not None:
        trace.save(args.trace)
    return 0


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def make_parser() -> argparse.ArgumentParser:
    """The options of all measurements; each says which of them it is for."""
    parser = argparse.ArgumentParser(
        prog="python -m minipaged.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--model", help="directory, hub id or GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="auto", help="(compare takes both float32 and bfloat16)")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--requests", type=positive, default=64, help="throughput, memory, ranks: how many")
    parser.add_argument("--repeats", type=positive, default=3, help="throughput, single, compare, attention: how often")
    parser.add_argument(
        "--workload", help="throughput, single, compare, memory: a JSON file of requests instead of random ones"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="throughput, single, compare: which")
    parser.add_argument(
        "--peer",
        nargs="+",
        default=[],
        metavar="hf|PYTHON",
        help="throughput, single, compare: measure by turns with ours transformers (hf), "
        "or vLLM, under the Python of an environment that has it",
    )
    parser.add_argument("--swap-space", type=float, default=1.0, help="preemption: GiB of host memory")
    parser.add_argument(
        "--tensor-parallel-size", type=int, help="throughput, sharing, ranks, …: how many ranks (default: 1; ranks: 3)"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=output_path, help="also write the numbers, with machine and versions"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=output_path,
        help="throughput, sharing: write all steps as a page for a browser; this takes time that is measured",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
