"""The bench hands `--trace` to whatever measures."""

from __future__ import annotations

import pytest

from minipaged.bench import __main__ as bench
from tests.unit.show.pictures import frame_by_hand


def test_a_measurement_leaves_a_trace_if_it_is_asked_for_one(tmp_path, monkeypatch):
    given = []

    def measure(args, on_step=None):
        given.append(on_step)
        if on_step is not None:
            on_step(*frame_by_hand({0: [(1, 4)]}))
        return []

    monkeypatch.setitem(bench.MEASUREMENTS, "sharing", measure)
    monkeypatch.setitem(bench.TRACED, "sharing", measure)
    assert bench.main(["sharing", "--trace", str(tmp_path / "out.html")]) == 0
    assert '"device":[[],[0,0,1],' in (tmp_path / "out.html").read_text()
    assert bench.main(["sharing"]) == 0
    assert given[1] is None


def test_a_measurement_that_serves_no_requests_takes_no_trace(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["control", "--trace", str(tmp_path / "out.html")])
    assert "--trace is for throughput and sharing" in capsys.readouterr().err
