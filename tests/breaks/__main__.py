"""Break one rule in a copy of this repository, and see which test names it.

    python -m tests.breaks                     lists the rules
    python -m tests.breaks lost-decrement      breaks that one, and shows what the tests say that should notice
    python -m tests.breaks all                 every one in turn; exit status 1 if a break goes unnoticed

A test that cannot fail proves nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.breaks.catalogue import BREAKS, Break

ROOT = Path(__file__).parents[2]
CONSOLE = Console(width=120, highlight=False)


def copy_with(broken: Break, folder: Path) -> None:
    """The package and its tests, with the one change made."""
    for name in ("minipaged", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    file = folder / "minipaged" / broken.file
    text = file.read_text()
    if text.count(broken.old) != 1:
        raise ValueError(f"{broken.file} has {text.count(broken.old)} places that read {broken.old!r}")
    file.write_text(text.replace(broken.old, broken.new))


def run_tests(broken: Break, folder: Path) -> tuple[bool, str]:
    """Whether the tests noticed, and what the first one that failed says."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--hypothesis-profile=break",
    ]
    done = subprocess.run([*command, broken.tests], cwd=folder, capture_output=True, text=True)
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    said = re.findall(r"^E   +(.*)", done.stdout, re.MULTILINE)
    return bool(failed), "\n".join([*failed, *said[:2]])


def try_out(name: str) -> bool:
    """Break it, show what happens; True where the tests noticed."""
    broken = BREAKS[name]
    CONSOLE.print(f"[bold]{name}[/]: {broken.rule}")
    for line in (f"- {line}" for line in broken.old.splitlines()):
        CONSOLE.print(f"  minipaged/{broken.file}  {line}", style="red", markup=False)
    for line in (f"+ {line}" for line in broken.new.splitlines()):
        CONSOLE.print(f"  minipaged/{broken.file}  {line}", style="green", markup=False)
    with tempfile.TemporaryDirectory() as folder:
        copy_with(broken, Path(folder))
        noticed, report = run_tests(broken, Path(folder))
    CONSOLE.print(
        report if noticed else f"nobody noticed ({broken.tests})", style=None if noticed else "bold red", markup=False
    )
    CONSOLE.print()
    return noticed


def main(names: list[str]) -> int:
    if not names:
        table = Table(title="rules that can be broken in a copy: make break ARGS=NAME", title_justify="left")
        for column in ("room", "name", "the rule", "tests that name it"):
            table.add_column(column)
        for name, broken in BREAKS.items():
            table.add_row(broken.room, name, broken.rule, broken.tests.removeprefix("tests/"))
        CONSOLE.print(table)
        return 0
    unknown = [name for name in names if name not in BREAKS and name != "all"]
    if unknown:
        print(f"no rule is called {', '.join(unknown)}; without arguments, this lists them", file=sys.stderr)
        return 2
    results = [try_out(name) for name in (BREAKS if "all" in names else names)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
