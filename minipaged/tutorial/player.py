"""Plays a tutorial: prose is rendered, code is shown, and runs when its reader has thought about it.

A cell is run as a notebook runs it: all cells share one namespace, and the value of a last expression is shown. At
every pause the reader can run Python of his own in that namespace. That is how an exercise is filled in.
"""

from __future__ import annotations

import ast
import code
import sys
import traceback
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.pretty import Pretty
from rich.protocol import is_renderable
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

from minipaged.tutorial.cells import Cell, Tutorial

QUIT, RUN_ON = "q", "r"
KEYS = "r runs all the rest · q quits · or type Python"
BEFORE_SECTION = f"Enter goes on · {KEYS}"
BEFORE_CODE = f"Enter runs the cell · {KEYS}"
BEFORE_SOLUTION = "check(your answer) tries it · Enter shows the solution · q quits"
THEME = "ansi_dark"
WIDTH = 88  # of prose: longer lines are hard to read

ReadLine = Callable[[str], str | None]  # prompt -> the line; None where there are no more


class Player:
    """One reader's way through one tutorial. `read_line` None: nobody is waited for."""

    def __init__(self, tutorial: Tutorial, console: Console, read_line: ReadLine | None) -> None:
        self._tutorial = tutorial
        self._console = console
        self._read_line = read_line
        self._namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(tutorial.path)}
        self._interpreter = code.InteractiveInterpreter(self._namespace)

    def play(self) -> int:
        """Until the end, or until the reader quits (0), or until a cell raises (1)."""
        for number, cell in enumerate(self._tutorial.cells, 1):
            if cell.begins_section and not self._goes_on(BEFORE_SOLUTION if cell.begins_solution else BEFORE_SECTION):
                return 0
            self._show(cell)
            if cell.is_prose:
                continue
            if not self._goes_on(BEFORE_CODE):
                return 0
            try:
                self._display(run_cell(cell, str(self._tutorial.path), self._namespace))
            except Exception as error:
                self._report(error, number, cell)
                return 1
            self._console.print()
        return 0

    def _goes_on(self, choices: str) -> bool:
        """Wait for the reader; False where he has had enough."""
        while self._read_line is not None:
            line = self._read_line(f"{choices} > ")
            if line is None or line.strip() == RUN_ON:
                self._read_line = None
            elif line.strip() == QUIT:
                return False
            elif not line.strip():
                break
            else:
                self._run_typed(line)
        return True

    def _run_typed(self, source: str) -> None:
        """The reader's own Python, several lines of it where the first is only a beginning."""
        while self._interpreter.runsource(source) and (line := self._read_line("... ")) is not None:
            source += f"\n{line}"

    def _show(self, cell: Cell) -> None:
        if cell.is_prose:
            width = min(WIDTH, self._console.width)
            if cell.begins_section:
                self._console.print(Rule(style="dim"), width=width)
            self._console.print(Markdown(cell.text, code_theme=THEME), width=width)
        else:
            self._console.print(Syntax(cell.text, "python", theme=THEME, background_color="default", word_wrap=True))
        self._console.print()

    def _display(self, value: Any) -> None:
        if value is not None:
            is_picture = is_renderable(value) and not isinstance(value, str)
            self._console.print(value if is_picture else Pretty(value))

    def _report(self, error: Exception, number: int, cell: Cell) -> None:
        """The traceback from the cell's own frame on: how it was called is nobody's concern."""
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != str(self._tutorial.path):
            own = own.tb_next
        traceback.print_exception(type(error), error, own)
        self._console.print(Text(f"cell {number} raised this ({self._tutorial.path.name}, line {cell.line})", "bold"))


def run_cell(cell: Cell, path: str, namespace: dict[str, Any]) -> Any:
    """Run a code cell in the namespace. Returns the value of its last expression; None where it ends in no expression.

    Its lines keep their numbers in the file, so that a traceback shows them.
    """
    tree = ast.parse(cell.text, path)
    ast.increment_lineno(tree, cell.line - 1)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, path, "exec", dont_inherit=True), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), path, "eval", dont_inherit=True), namespace)


def from_stdin(prompt: str) -> str | None:
    """A line of the terminal, with a prompt; or of a pipe, without one."""
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return QUIT if sys.stdin.isatty() else None
