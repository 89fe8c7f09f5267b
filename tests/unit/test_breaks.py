"""Each rule that can be broken is broken by its change, and some test notices."""

from __future__ import annotations

import pytest

from tests.breaks.__main__ import ROOT, copy_with, main, run_tests
from tests.breaks.catalogue import BREAKS


@pytest.mark.parametrize("name", BREAKS)
def test_the_change_fits_the_code_as_it_is(name):
    broken = BREAKS[name]
    assert (ROOT / "minipaged" / broken.file).read_text().count(broken.old) == 1
    assert (ROOT / broken.tests).exists()


def test_every_room_that_keeps_rules_has_one_to_break():
    rooms = {broken.room for broken in BREAKS.values()}
    assert rooms >= {"blocks", "scheduling", "decoding", "text", "loading", "model", "worker", "engine"}


def test_every_property_test_is_seen_to_fail():
    files = {f"tests/property/{file.name}" for file in (ROOT / "tests" / "property").glob("test_*.py")}
    files -= {"tests/property/test_compiled_engine_law.py"}  # the slow twin of test_engine_law.py
    assert files <= {broken.tests for broken in BREAKS.values()}


def test_an_unknown_name_is_refused_and_no_name_lists_them(capsys):
    assert main(["nothing"]) == 2
    assert main([]) == 0
    assert "skipped-copy" in capsys.readouterr().out


def test_a_skipped_copy_is_noticed(tmp_path):
    copy_with(BREAKS["skipped-copy"], tmp_path)
    noticed, report = run_tests(BREAKS["skipped-copy"], tmp_path)
    assert noticed, report


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_every_break_is_noticed(name, tmp_path):
    copy_with(BREAKS[name], tmp_path)
    noticed, report = run_tests(BREAKS[name], tmp_path)
    assert noticed, report
