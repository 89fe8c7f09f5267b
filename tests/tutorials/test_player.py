"""`python -m minipaged.tutorial`: the list, the pauses, typed Python, cells that raise, pipes and terminals."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from minipaged.errors import InvalidParameter
from minipaged.tutorial import __main__ as program
from minipaged.tutorial.cells import find_tutorials, read_tutorial, split_cells
from minipaged.tutorial.player import Player, run_cell

ROOT = Path(__file__).parents[2]
SOURCE = """# %% [markdown]
# # 07 · A title
#
# One sentence,
# on two lines.

# %%
number = 20

# %% [markdown]
# ## Run
#
# Twice that, and two.

# %%
number = 2 * number
number + 2

# %% [markdown]
# ## Solution

# %%
print("the solution")
"""


@pytest.fixture
def tutorial(tmp_path):
    return write(tmp_path, SOURCE)


def write(folder, source):
    path = folder / "07_a_title.py"
    path.write_text(source, encoding="utf-8")
    return read_tutorial(path)


def play(tutorial, lines):
    """The exit status, what was shown, and the prompts at which the reader was waited for."""
    console, prompts, lines = Console(file=io.StringIO(), width=80), [], iter(lines)

    def read_line(prompt):
        prompts.append(prompt)
        return next(lines)

    status = Player(tutorial, console, read_line).play()
    return status, console.file.getvalue(), prompts


# ---------------------------------------------------------------- files


def test_a_file_is_cut_into_prose_and_code_that_know_their_lines():
    cells = split_cells(SOURCE)
    assert [cell.is_prose for cell in cells] == [True, False, True, False, True, False]
    lines = SOURCE.splitlines()
    for cell in cells:
        first = cell.text.splitlines()[0]
        assert lines[cell.line - 1] == (f"# {first}" if cell.is_prose else first)


def test_the_first_cell_gives_number_title_and_summary(tutorial):
    assert (tutorial.number, tutorial.title, tutorial.summary) == (7, "A title", "One sentence, on two lines.")


@pytest.mark.parametrize("source", ["", "x = 1", "# %% [markdown]\n# A title\n", SOURCE.replace("07", "08")])
def test_a_file_without_a_title_of_its_number_is_refused_by_name(tmp_path, source):
    with pytest.raises(InvalidParameter, match=r"07_a_title.py.*begin with a prose cell"):
        write(tmp_path, source)


def test_without_the_repository_there_are_no_tutorials_and_the_error_says_so(tmp_path):
    with pytest.raises(InvalidParameter, match="they come with the repository, not with the package"):
        find_tutorials(tmp_path)


# ---------------------------------------------------------------- cells


def test_a_cell_gives_the_value_of_its_last_expression():
    namespace = {}
    first, second = split_cells("# %%\nx = 1\n# %%\nx += 1\nx * 21")
    assert run_cell(first, "file.py", namespace) is None
    assert run_cell(second, "file.py", namespace) == 42


def test_a_cell_is_compiled_as_in_a_script_without_what_the_player_imports_from_the_future():
    [cell] = split_cells("# %%\ndef f(x: no_such_name): ...")
    with pytest.raises(NameError, match="no_such_name"):
        run_cell(cell, "file.py", {})


def test_values_are_shown_as_in_a_notebook_and_pictures_are_drawn(tmp_path):
    cells = "\n# %%\n'text'\n# %%\nNone\n# %%\nfrom rich.text import Text\nText('a picture')\n"
    _, text, _ = play(write(tmp_path, SOURCE + cells), [""] * 8)
    lines = text.splitlines()
    assert "42" in lines and "a picture" in lines
    assert lines.count("'text'") == 2  # the code, and its value
    assert lines.count("None") == 1  # the code alone
    assert repr(Text("a picture")) not in text


def test_a_cell_that_raises_ends_it_with_the_traceback_of_the_cell_alone(tmp_path, capsys):
    source = SOURCE.replace("number + 2\n", "def divide():\n    return number / 0\n\n\ndivide()\n")
    status, text, _ = play(write(tmp_path, source), [""] * 5)
    error = capsys.readouterr().err
    assert status == 1
    assert "cell 4 raised this (07_a_title.py, line 16)" in text
    assert "line 21, in <module>\n    divide()" in error and "line 18, in divide\n    return number / 0" in error
    assert "ZeroDivisionError" in error
    assert "player.py" not in error
    assert "the solution" not in text


# ---------------------------------------------------------------- the reader


def test_it_waits_before_each_section_and_each_cell_of_code(tutorial, capsys):
    status, text, prompts = play(tutorial, [""] * 5)
    assert status == 0
    assert len(prompts) == 5
    assert [prompt.startswith("check(your answer)") for prompt in prompts] == [False, False, False, True, False]
    assert capsys.readouterr().out == "the solution\n"
    assert "Twice that" in text and "number = 2 * number" in text


def test_nothing_of_a_section_is_shown_before_the_reader_goes_on(tutorial):
    _, text, _ = play(tutorial, ["", "", "", "q"])
    assert "42" in text and "solution" not in text.lower()


def test_q_quits_and_r_runs_on(tutorial, capsys):
    assert play(tutorial, ["q"])[0] == 0
    assert capsys.readouterr().out == ""
    _, _, prompts = play(tutorial, ["", "r"])
    assert len(prompts) == 2
    assert capsys.readouterr().out == "the solution\n"


def test_when_there_are_no_more_lines_it_runs_on(tutorial, capsys):
    status, _, prompts = play(tutorial, ["", None])
    assert (status, len(prompts)) == (0, 2)
    assert capsys.readouterr().out == "the solution\n"


def test_typed_python_runs_in_the_namespace_of_the_cells(tutorial, capsys):
    _, text, _ = play(tutorial, ["", "number = 4", "number * 100", "", "", "q"])
    assert "400" in capsys.readouterr().out
    assert "10" in text.splitlines()


def test_typed_python_may_have_several_lines_and_may_be_wrong(tutorial, capsys):
    lines = ["def double(x):", "    return 2 * x", "", "double(number)", "double(", ")", "q"]
    status, _, prompts = play(tutorial, ["", *lines])
    captured = capsys.readouterr()
    assert status == 0
    assert prompts.count("... ") == 3
    assert "40" in captured.out
    assert "TypeError" in captured.err


# ---------------------------------------------------------------- the program


def test_without_a_number_it_lists_them(tutorial, capsys, monkeypatch):
    monkeypatch.setattr(program, "find_tutorials", lambda: [tutorial])
    assert program.main([]) == 0
    text = capsys.readouterr().out
    assert "  7  A title\n" in text and "One sentence, on two lines." in text


def test_no_pause_waits_for_nobody_and_a_failure_is_an_exit_status(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("it waits"))
    for ending, status in (("", 0), ("\nraise KeyError('no')\n", 1)):
        tutorial = write(tmp_path, SOURCE + ending)
        monkeypatch.setattr(program, "find_tutorials", lambda tutorial=tutorial: [tutorial])
        assert program.main(["7", "--no-pause"]) == status
    assert "KeyError: 'no'" in capsys.readouterr().err


def test_a_number_that_is_none_is_refused_with_those_that_are(tutorial, capsys, monkeypatch):
    monkeypatch.setattr(program, "find_tutorials", lambda: [tutorial])
    assert program.main(["8"]) == 2
    assert capsys.readouterr().err == "number = 8: choose one of 7\n"


def run(stdin, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("stdin", ["", "\n\n"], ids=["no input", "two lines"])
def test_at_the_end_of_a_pipe_it_runs_on_and_shows_no_prompt(stdin):
    done = run(stdin, "-m", "minipaged.tutorial", "3")
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout and "Enter" not in done.stdout


def test_a_tutorial_runs_as_a_script():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    [script] = ROOT.glob("tutorials/03_*.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")


@pytest.mark.parametrize("keys", [b"\n\nq\n", b"\n\x04"], ids=["q", "ctrl-d"])
def test_on_a_terminal_it_prompts_and_may_be_left(keys):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "minipaged.tutorial", "3"], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown = b""
    for key in keys.splitlines(keepends=True):
        while b"Python > " not in shown:
            shown += os.read(master, 4096)
        shown = shown.split(b"Python > ")[-1]
        os.write(master, key)
    rest = b""
    try:
        while new := os.read(master, 4096):
            rest += new
    except OSError:  # the terminal's other side is closed
        pass
    os.close(master)
    assert process.wait(timeout=60) == 0
    assert b"Solution" not in rest
