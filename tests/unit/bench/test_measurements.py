"""The measurements run, and say what they should; how fast anything is, no test decides."""

import json

import pytest
import torch

from minipaged.bench import __main__ as bench
from minipaged.bench import attention, memory
from minipaged.model.attention import make_backend
from tests.tiny_llama import random_prompt, tiny_llama


@pytest.fixture(scope="module")
def model_and_workload(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    requests = [
        {"prompt_token_ids": list(random_prompt(5 + 3 * i, i)), "max_tokens": 4 + 5 * (i % 7)} for i in range(12)
    ]
    workload = directory / "workload.json"
    workload.write_text(json.dumps({"requests": requests}))
    return ["--model", str(tiny_llama("gqa").save(directory / "model")), "--workload", str(workload)]


def test_paging_runs_more_requests_in_the_same_memory_and_wastes_less(
    model_and_workload, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(memory, "POOL_TOKENS", 512)
    found = tmp_path / "found.json"
    arguments = ["memory", *model_and_workload, "--max-model-len", "128", "--json", str(found)]
    assert bench.main(arguments) == 0
    assert "in one piece" in capsys.readouterr().out
    recorded = json.loads(found.read_text())
    paged, reserved = recorded["reports"][0]["rows"]
    assert reserved["most_running"] == 4  # 512 slots, 128 for each
    assert paged["most_running"] > 4
    assert paged["steps"] < reserved["steps"]
    assert paged["allocated_MiB"] - paged["filled_MiB"] < reserved["allocated_MiB"] - reserved["filled_MiB"]
    assert {"processor", "threads", "torch"} <= recorded["machine"].keys()
    assert recorded["arguments"] == arguments


def test_both_ways_get_the_same_memory_whatever_the_longest_request(model_and_workload, monkeypatch, capsys):
    monkeypatch.setattr(memory, "POOL_TOKENS", 512)
    assert bench.main(["memory", *model_and_workload, "--max-model-len", "100"]) == 0
    assert "over 600 slots" in capsys.readouterr().out  # six blocks of 100, 37 of 16


def test_attention_is_measured_for_every_backend_of_a_cpu(capsys):
    assert bench.main(["attention", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    shown = ("reference", "gather", "compiled", "not paged", "roof", "triton is left out")
    assert all(name in printed for name in shown)


def test_keys_in_one_piece_are_those_of_the_blocks():
    torch.manual_seed(0)
    batch, [layer, *_] = attention._scene([1, 16, 40], torch.float64)
    query = torch.randn(3, attention.NUM_HEADS, attention.HEAD_DIM, dtype=torch.float64)
    expected = make_backend("reference").forward(query, layer, batch)
    found = attention.attend_one_piece(query, attention.in_one_piece(batch, layer))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_an_unknown_dtype_is_refused_by_name(capsys):
    assert bench.main(["attention", "--dtype", "int8"]) == 2
    assert "dtype = 'int8'" in capsys.readouterr().err
