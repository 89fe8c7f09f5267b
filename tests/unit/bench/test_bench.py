"""What the bench's measurements are given: a trace if one is asked for, and no option that they would ignore."""

from __future__ import annotations

import pytest

from minipaged.bench import __main__ as bench
from minipaged.bench.contestants import modes_of
from tests.tiny_llama import tiny_llama
from tests.unit.show.pictures import frame_by_hand


def test_a_measurement_leaves_a_trace_if_it_is_asked_for_one(tmp_path, monkeypatch):
    given = []

    def measure(args, on_step=None):
        given.append(on_step)
        if on_step is not None:
            on_step(*frame_by_hand({0: [(1, 4)]}))
        return []

    monkeypatch.setitem(bench.MEASUREMENTS, "sharing", measure)
    assert bench.main(["sharing", "--trace", str(tmp_path / "out.html")]) == 0
    assert '"device":[[],[0,0,1],' in (tmp_path / "out.html").read_text()
    assert bench.main(["sharing"]) == 0
    assert given[1] is None


@pytest.mark.parametrize(
    "arguments",
    ["control --trace out.html", "attention --model x", "compare --dtype float32", "single --requests 3"],
)
def test_a_measurement_refuses_the_options_that_it_has_no_use_for(arguments, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments.split())
    name, options = arguments.split(maxsplit=1)
    message = capsys.readouterr().err
    assert f"{name} has no use for {options}" in message
    assert f"usage: python -m minipaged.bench {name}" in message


def test_a_trace_is_of_one_engine(capsys):
    assert bench.main(["throughput", "--model", "/no/such", "--trace", "out.html"]) == 2
    assert "trace = 'out.html': it shows one engine: choose one of --modes" in capsys.readouterr().err


def test_every_measurement_says_what_it_reads():
    assert set(bench.READS) == set(bench.MEASUREMENTS)


def test_over_several_ranks_nothing_is_compiled_unless_the_user_says_so():
    parser = bench.make_parser()
    assert modes_of(parser.parse_args(["throughput"])) == ["eager", "compiled"]
    assert modes_of(parser.parse_args(["throughput", "--tensor-parallel-size", "2"])) == ["eager"]
    asked = ["throughput", "--modes", "compiled", "eager", "compiled", "--tensor-parallel-size", "2"]
    assert modes_of(parser.parse_args(asked)) == ["compiled", "eager"]


def test_one_rank_alone_is_no_measurement_of_what_crosses(capsys):
    assert bench.main(["ranks", "--tensor-parallel-size", "1"]) == 2
    assert "tensor_parallel_size = 1: at least 2" in capsys.readouterr().err


def test_memory_counts_no_requests_that_were_cut_short(tmp_path, capsys):
    (tmp_path / "long.json").write_text('{"requests": [{"prompt_token_ids": [1, 2, 3], "max_tokens": 5}]}')
    model = tiny_llama("gqa").save(tmp_path / "model")
    options = ["--model", str(model), "--workload", str(tmp_path / "long.json")]
    assert bench.main(["memory", *options, "--max-model-len", "4"]) == 2
    assert "minipaged generated" in capsys.readouterr().err
    assert bench.main(["memory", *options, "--max-model-len", "16"]) == 0
