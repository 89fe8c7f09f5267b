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


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


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

OPTIONS = {
    "--model": {"help": "directory, hub id or GGUF file (default: SmolLM2-135M-Instruct)"},
    "--dtype": {"default": "auto", "help": "(default: the checkpoint's own; attention: float32)"},
    "--max-model-len": {"type": int, "default": 2048, "help": "(default: 2048)"},
    "--requests": {"type": positive, "default": 64, "help": "how many (default: 64)"},
    "--repeats": {"type": positive, "default": 3, "help": "how often each is measured (default: 3)"},
    "--workload": {
        "metavar": "FILE",
        "help": "requests as JSON, instead of random ones (single: the first one's prompt)",
    },
    "--modes": {
        "nargs": "+",
        "choices": MODES,
        "help": "which of ours, and of vLLM (default: both; over several ranks eager, which is all there is)",
    },
    "--peer": {
        "nargs": "+",
        "default": [],
        "metavar": "hf|PYTHON",
        "help": "measure by turns with ours transformers (hf), or vLLM, under the Python of an environment that has it",
    },
    "--swap-space": {"type": float, "default": 1.0, "help": "GiB of host memory (default: 1)"},
    "--tensor-parallel-size": {"type": int, "help": "how many ranks (default: 1; of `ranks`: 3)"},
    "--trace": {
        "metavar": "FILE",
        "type": output_path,
        "help": "write all steps as a page for a browser; this takes time that is measured",
    },
    "--json": {"metavar": "FILE", "type": output_path, "help": "also write the numbers, with machine and versions"},
}

ENGINE = "--model --dtype --max-model-len"
BY_TURNS = "--workload --repeats --modes --peer --tensor-parallel-size"
READS = {  # what each measurement has use for; --json all of them
    "throughput": f"{ENGINE} {BY_TURNS} --requests --trace",
    "single": f"{ENGINE} {BY_TURNS}",
    "compare": f"--model --max-model-len {BY_TURNS} --requests",
    "attention": "--dtype --repeats",
    "memory": f"{ENGINE} --workload --requests",
    "sharing": f"{ENGINE} --tensor-parallel-size --trace",
    "preemption": "--model --dtype --swap-space",
    "control": "",
    "ranks": f"{ENGINE} --requests --tensor-parallel-size",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one measurement; returns the exit status."""
    args, unread = make_parser().parse_known_args(arguments)
    if unread:
        args.parser.error(f"{args.measurement} has no use for {' '.join(unread)}")
    path = getattr(args, "trace", None)
    trace = [Trace(f"bench {args.measurement}")] if path else []
    try:
        if getattr(args, "workload", None) is not None:
            read_workload(args.workload)  # refused before anything is loaded
        reports = MEASUREMENTS[args.measurement](args, *trace)
    except MinipagedError as error:
        print(error, file=sys.stderr)
        return 2
    for report in reports:
        report.print()
    if args.json:
        write_json(reports, args.json, sys.argv[1:] if arguments is None else arguments)
    if trace:
        trace[0].save(path)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """A parser for each measurement, with the options that it reads and no other."""
    parser = argparse.ArgumentParser(
        prog="python -m minipaged.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="NAME")
    for name, reads in READS.items():
        own = measurements.add_parser(name)
        own.set_defaults(parser=own)  # it explains its own options better than the parser of all
        for option in f"{reads} --json".split():
            own.add_argument(option, **OPTIONS[option])
    return parser


if __name__ == "__main__":
    sys.exit(main())
