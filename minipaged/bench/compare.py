"""Ours against its peers, in float32 and bfloat16: `throughput` and `single` of each, and one table of the ratios."""

from __future__ import annotations

from minipaged.bench.contestants import MODES, contestants
from minipaged.bench.report import Report
from minipaged.bench.single import serve_alone
from minipaged.bench.throughput import serve
from minipaged.bench.workload import load_workload

DTYPES = ("float32", "bfloat16")
SPEED = "tokens_per_s"


def measure(args) -> list[Report]:
    """One dtype after the other; all contestants of a dtype are measured in turn."""
    details, columns = [], {}
    for dtype in DTYPES:
        with contestants(args, dtype) as found:
            workload = load_workload(args, found.worker.config.vocab_size)
            batch = serve(found, workload, args.repeats)
            alone = serve_alone(found, workload[0], args.repeats)
        details += [batch, alone]
        columns[dtype] = summary(by_who(batch), by_who(alone))
    report = Report("ours against its peers (medians), and its share of the machine's roofs")
    for line in columns[DTYPES[0]]:
        report.add(figure=line, **{dtype: columns[dtype][line] for dtype in DTYPES})
    return [*details, report]


def by_who(report: Report) -> dict[str, dict]:
    return {row["who"]: row for row in report.rows}


def summary(batch: dict[str, dict], alone: dict[str, dict]) -> dict[str, str]:
    """Lines of the table: what is compared, and the ratio or share."""
    lines = {}
    for rows, what in ((batch, "throughput"), (alone, "single stream")):
        for ours, peer in pairs(rows):
            lines[f"{what}: {ours} / {peer}"] = f"{rows[ours][SPEED] / rows[peer][SPEED]:.2f}×"
    for ours in (name for name in alone if name.startswith("minipaged")):
        lines[f"{ours}: prefill, of the arithmetic roof"] = alone[ours]["of_the_roof"]
        lines[f"{ours}: single-stream decode, of the memory roof"] = alone[ours]["of_that_roof"]
    return lines


def pairs(names) -> list[tuple[str, str]]:
    """Who is held against whom: vLLM against ours in the same mode, transformers against all of ours."""
    ours = [name for name in names if name.startswith("minipaged")]
    peers = [name for name in names if name not in ours]
    mode = {name: name.rpartition(", ")[2] for name in names}
    return [(own, peer) for peer in peers for own in ours if mode[peer] not in MODES or mode[peer] == mode[own]]
