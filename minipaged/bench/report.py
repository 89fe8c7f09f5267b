"""What a measurement found, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


@dataclass
class Report:
    """Rows under a title; each row has the same columns, in the order of the first one."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, **columns: Any) -> None:
        self.rows.append(columns)

    def print(self) -> None:
        table = Table(title=self.title, title_justify="left", caption="\n".join(self.notes), caption_justify="left")
        for column in self.rows[0]:
            table.add_column(column.replace("_", " "))
        for row in self.rows:
            table.add_row(*map(_shown, row.values()))
        Console(width=140).print(table, highlight=False)


def write_json(reports: list[Report], path: str, arguments: list[str]) -> None:
    """The numbers, with the arguments, the machine and the versions that they belong to."""
    machine = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }
    found = {"arguments": arguments, "machine": machine, "reports": [asdict(report) for report in reports]}
    Path(path).write_text(json.dumps(found, indent=2) + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}"


def _processor() -> str:
    """The processor's name where Linux tells it; `platform.processor` says less."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
