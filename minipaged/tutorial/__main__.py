"""`python -m minipaged.tutorial` lists the tutorials; with a number, it steps through one.

python -m minipaged.tutorial                 the list
python -m minipaged.tutorial 4               the fourth: Enter runs a cell, q quits
python -m minipaged.tutorial 4 --no-pause    all of it at once
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from minipaged.errors import InvalidParameter, MinipagedError
from minipaged.tutorial.cells import Tutorial, find_tutorials
from minipaged.tutorial.player import Player, from_stdin


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 where a cell raised, 2 where there is no such tutorial."""
    parser = argparse.ArgumentParser(
        prog="python -m minipaged.tutorial", description="Step through a tutorial; without a number, list them."
    )
    parser.add_argument("number", nargs="?", type=int, help="the tutorial's")
    parser.add_argument("--no-pause", action="store_true", help="wait for nobody")
    args = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    try:
        tutorials = find_tutorials()
        if args.number is None:
            _list(tutorials, console)
            return 0
        return _play(tutorials, args.number, console, args.no_pause)
    except MinipagedError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read along has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _list(tutorials: list[Tutorial], console: Console) -> None:
    for tutorial in tutorials:
        console.print(f"{tutorial.number:>3}  {tutorial.title}", style="bold", highlight=False, markup=False)
        console.print(Padding(Text(tutorial.summary), (0, 0, 0, 5)))
    console.print("\npython -m minipaged.tutorial NUMBER opens one of them.", highlight=False)


def _play(tutorials: list[Tutorial], number: int, console: Console, no_pause: bool) -> int:
    by_number = {tutorial.number: tutorial for tutorial in tutorials}
    if number not in by_number:
        raise InvalidParameter("number", number, f"choose one of {', '.join(map(str, by_number))}")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  # gives the reader's lines a history and arrow keys
    return Player(by_number[number], console, None if no_pause else from_stdin).play()


if __name__ == "__main__":
    sys.exit(main())
