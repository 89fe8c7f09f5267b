"""The README tells the truth: its reading order, its file names, its snippets."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import reading_order

TEXT = reading_order.README.read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_reading_order_has_the_right_line_counts():
    assert reading_order.render() in TEXT, "run `python -m tests.reading_order`"


def test_the_core_can_be_read_in_an_afternoon():
    assert sum(map(reading_order.num_lines, reading_order.CORE)) <= reading_order.CORE_LIMIT


def test_the_reading_order_leaves_no_file_out():
    listed = [*reading_order.CORE, *(path for paths in reading_order.CHAPTERS.values() for path in paths)]
    package = reading_order.ROOT / "minipaged"
    files = [file.relative_to(package).as_posix() for file in package.rglob("*.py") if file.name != "__init__.py"]
    assert sorted(path for path in listed if not path.endswith("__init__.py")) == sorted(files)


def test_every_file_that_the_readme_names_is_there():
    for path in re.findall(r"`([a-z_/]+\.py)`", TEXT):
        assert (reading_order.ROOT / "minipaged" / path).is_file(), path


def test_every_make_target_that_the_readme_names_is_there():
    makefile = (reading_order.ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.real_model
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_runs_as_it_stands(snippet, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(reading_order.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
