"""The tutorials as files: Python in percent cells, which is a script, a notebook and a lecture at the same time.

    # %% [markdown]
    # # 03 · A block table by hand
    #
    # The one idea of this tutorial in a sentence.

    # %%
    from rich import print

Jupyter (with jupytext) and VS Code open such a file as a notebook; `python FILE` runs it; player.py steps through it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from minipaged.errors import InvalidParameter

FOLDER = Path(__file__).parents[2] / "tutorials"
_MARKER = re.compile(r"# %%( \[markdown\])?\s*")
_FILE_NAME = re.compile(r"(\d+)_\w+\.py")


@dataclass(frozen=True)
class Cell:
    """Prose (Markdown) or code. `line` is the number of its first line in the file."""

    is_prose: bool
    text: str
    line: int

    @property
    def begins_section(self) -> bool:
        return self.is_prose and self.text.startswith("## ")

    @property
    def begins_solution(self) -> bool:
        return self.is_prose and self.text.startswith("## Solution")


@dataclass(frozen=True)
class Tutorial:
    """One file. `title` and `summary` are those of its first cell."""

    number: int
    path: Path
    title: str
    summary: str
    cells: tuple[Cell, ...]


def read_tutorial(path: Path) -> Tutorial:
    """The cells of a file. Its first cell begins with the title, `# 03 · Title`, and a paragraph that sums it up.

    Raises:
        InvalidParameter: the file's name or its first cell is none of a tutorial.
    """
    cells = split_cells(path.read_text(encoding="utf-8"))
    name = _FILE_NAME.fullmatch(path.name)
    head = re.match(r"# (\d+) · (.+)\n\n((?:.+\n?)+)", cells[0].text) if cells and cells[0].is_prose else None
    if name is None or head is None or int(head[1]) != int(name[1]):
        raise InvalidParameter(
            "tutorial", str(path), "must be named NN_name.py, and begin with a prose cell: # NN · Title, then a summary"
        )
    return Tutorial(int(name[1]), path, head[2], " ".join(head[3].split()), tuple(cells))


def split_cells(source: str) -> list[Cell]:
    """Cut at the `# %%` lines. Empty cells are left out; what stands before the first marker is code."""
    cells = []
    is_prose, first, lines = False, 1, []
    for number, line in enumerate([*source.splitlines(), "# %%"], 1):
        marker = _MARKER.fullmatch(line)
        if marker is None:
            lines.append(line)
            continue
        if any(map(str.strip, lines)):
            cells.append(_cell(is_prose, lines, first))
        is_prose, first, lines = marker[1] is not None, number + 1, []
    return cells


def _cell(is_prose: bool, lines: list[str], first: int) -> Cell:
    if is_prose:
        lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
    text = "\n".join(lines)
    blank = len(text) - len(text.lstrip("\n"))
    return Cell(is_prose, text.strip("\n"), first + blank)


def find_tutorials(folder: Path = FOLDER) -> list[Tutorial]:
    """All of them, by number.

    Raises:
        InvalidParameter: there is none; they come with the repository, and not with an installed package.
    """
    paths = [path for path in sorted(folder.glob("*.py")) if _FILE_NAME.fullmatch(path.name)]
    if not paths:
        raise InvalidParameter(
            "tutorials", str(folder), "no tutorial is there: they come with the repository, not with the package"
        )
    return sorted(map(read_tutorial, paths), key=lambda tutorial: tutorial.number)
