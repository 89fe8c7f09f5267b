"""The rooms and their arrows, held against the imports that the code really has.

programs ──▶ engine ──▶ scheduling ──▶ blocks          plain data (config, step, …) lies under all
    │           ├─────▶ decoding
    │           ├─────▶ text
    │           └─────▶ worker ──▶ model, loading
    └──────▶ show                                      (draws from plain data alone)
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "minipaged"
PLAIN_DATA = {
    "beam_search_params",
    "checks",
    "config",
    "engine_args",
    "errors",
    "metrics",
    "outputs",
    "sampling_params",
    "sampling_rules",
    "snapshot",
    "step",
}
ARROWS = {
    "blocks": set(),
    "scheduling": {"blocks"},
    "decoding": set(),
    "text": set(),
    "loading": set(),
    "model": set(),
    "worker": {"model", "loading"},
    "engine": {"scheduling", "blocks", "decoding", "text", "worker"},
    "show": set(),
    "chat": {"engine", "text", "show"},
    "bench": {"engine", "model", "worker", "show"},
    "watch": {"engine", "show"},
    "tutorial": set(),
}
WITHOUT_TORCH = {"blocks", "scheduling", "decoding", "text", "show"} | PLAIN_DATA
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(file: Path) -> set[str]:
    """Absolute names of all modules that a file imports, wherever in it."""
    package = ["minipaged", *file.relative_to(PACKAGE).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names if module == "minipaged"}
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_imports_only_where_an_arrow_leads(file):
    room = room_of(file)
    if room == "__init__":
        return
    modules = (
        "minipaged.scheduling.scheduler, minipaged.blocks.manager, minipaged.decoding.stopping, "
        "minipaged.text.detokenizer, minipaged.sampling_params"
    )
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_triton_is_needed_by_its_kernels_alone_and_they_by_their_backend():
    """It is an optional dependency: what every user imports does without. The backend imports it when it is built."""
    attention = PACKAGE / "model" / "attention"
    backend = attention / "triton_backend.py"
    kernels = set(attention.glob("triton_*.py")) - {backend}
    names = {"triton", *(f"minipaged.model.attention.{file.stem}" for file in kernels)}
    users = {file for file in FILES if names & imported_modules(file)}
    assert users == kernels | {backend}
    code = (
        "import sys, minipaged.model.attention; "
        "loaded = [name for name in sys.modules if name.startswith('minipaged.model.attention.triton_')]; "
        "assert loaded == ['minipaged.model.attention.triton_backend'], loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_is_short_enough_to_read_in_one_go(file):
    assert len(file.read_text().splitlines()) <= 300
