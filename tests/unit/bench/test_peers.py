"""Peers are measured by turns with ours: who is loaded, who is held against whom, and what a broken one says."""

import json
import os
import select
import subprocess
import sys

import pytest
import torch

from minipaged.bench import __main__ as bench
from minipaged.bench import vllm_peer
from minipaged.bench.compare import pairs, summary
from minipaged.errors import InvalidParameter
from tests.tiny_engine import tiny_tokenizer
from tests.tiny_llama import random_prompt, tiny_llama

EAGER = ["--modes", "eager", "--dtype", "float32"]

# Stands in for vLLM in the other environment. It talks on stdout, as the real one may.
FAKE_VLLM = """
import os, sys
from types import SimpleNamespace as Some
__version__ = "9.9"
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0 and ignore_eos
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, dtype, enforce_eager, max_model_len, **options):
        with open(os.environ.get("MODES_LOG", os.devnull), "a") as log:
            print(enforce_eager, file=log)
        print("loading", model)
        self.runs = 0
        assert dtype in ("float32", "bfloat16") and max_model_len == 192
    def generate(self, prompts, params, use_tqdm):
        print("generating")
        self.runs += 1
        if self.runs > int(os.environ.get("DIE_AFTER", 99)):
            sys.exit("out of luck")
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        return [Some(outputs=[Some(token_ids=[0] * (p.max_tokens - TOO_FEW))]) for p in params]
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    directory = tmp_path_factory.mktemp("peers")
    requests = [{"prompt_token_ids": list(random_prompt(4 + i, i)), "max_tokens": 3 + i} for i in range(3)]
    workload = directory / "workload.json"
    workload.write_text(json.dumps({"requests": requests}))
    model = tiny_llama("gqa").save(directory / "model")
    tiny_tokenizer()._backend.save(str(model / "tokenizer.json"))
    return ["--model", str(model), "--workload", str(workload), "--max-model-len", "192", "--repeats", "1", *EAGER]


@pytest.fixture
def python_with_vllm(tmp_path, monkeypatch):
    def make(too_few_tokens: int = 0) -> str:
        (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("TOO_FEW", str(too_few_tokens)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(vllm_peer, "REST", 0.0)  # this one rests at once
        return sys.executable

    return make


def found(tmp_path, *arguments) -> list[dict]:
    assert bench.main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    return json.loads((tmp_path / "found.json").read_text())["reports"]


def test_peers_serve_the_same_requests_beside_ours(options, python_with_vllm, tmp_path):
    peers = ["--peer", "hf", python_with_vllm()]
    (report,) = found(tmp_path, "throughput", *options, *peers)
    assert [row["who"] for row in report["rows"]] == ["minipaged, eager", "transformers", "vLLM 9.9, eager"]
    assert all(row["tokens_per_s"] > 0 for row in report["rows"])


def test_one_request_alone_is_measured_for_everybody(options, python_with_vllm, tmp_path):
    peers = ["--peer", "hf", python_with_vllm()]
    (report,) = found(tmp_path, "single", *options, *peers)
    assert [row["who"] for row in report["rows"]] == ["minipaged, eager", "transformers", "vLLM 9.9, eager"]


def test_a_model_too_short_to_answer_is_refused(options, capsys):
    assert bench.main(["single", *options, "--max-model-len", "100"]) == 2
    assert "max_model_len = 100" in capsys.readouterr().err


def test_the_comparison_holds_both_dtypes_against_the_peer(options, python_with_vllm, tmp_path):
    both = [option for option in options if option not in ("--dtype", "float32")]
    *details, table = found(tmp_path, "compare", *both, "--peer", python_with_vllm())
    assert len(details) == 4
    assert "throughput: minipaged, eager / vLLM 9.9, eager" in [row["figure"] for row in table["rows"]]
    assert all(row[dtype] for row in table["rows"] for dtype in ("float32", "bfloat16"))


def test_a_peer_with_modes_is_held_against_the_same_mode_and_another_against_both():
    names = ["minipaged, eager", "minipaged, compiled", "transformers", "vLLM 1, eager", "vLLM 1, compiled"]
    assert pairs(names) == [
        ("minipaged, eager", "transformers"),
        ("minipaged, compiled", "transformers"),
        ("minipaged, eager", "vLLM 1, eager"),
        ("minipaged, compiled", "vLLM 1, compiled"),
    ]


def test_the_table_divides_our_speed_by_the_peers():
    def rows(ours, peer):
        shares = {"of_the_roof": "60%", "of_that_roof": "50%"}
        return {
            "minipaged, eager": {"tokens_per_s": ours, **shares},
            "transformers": {"tokens_per_s": peer, **shares},
        }

    assert summary(rows(30, 10), rows(5, 20)) == {
        "throughput: minipaged, eager / transformers": "3.00×",
        "single stream: minipaged, eager / transformers": "0.25×",
        "minipaged, eager: prefill, of the arithmetic roof": "60%",
        "minipaged, eager: single-stream decode, of the memory roof": "50%",
    }


@pytest.mark.parametrize("peer", ["/no/such/python", "fh"])
def test_a_peer_that_is_not_there_is_named_with_what_is_allowed(options, peer, capsys):
    assert bench.main(["throughput", *options, "--peer", peer]) == 2
    message = capsys.readouterr().err
    assert f"peer = '{peer}'" in message
    assert "hf, or the path of a Python that has vLLM" in message


def test_two_environments_with_the_same_vllm_have_a_row_each(options, python_with_vllm, tmp_path):
    (tmp_path / "python").symlink_to(python_with_vllm())
    peers = ["--peer", sys.executable, str(tmp_path / "python")]
    (report,) = found(tmp_path, "throughput", *options, *peers)
    name = "vLLM 9.9, eager"
    assert [row["who"] for row in report["rows"]] == ["minipaged, eager", name, f"{tmp_path / 'python'}: {name}"]


@pytest.mark.parametrize("waits", [True, False], ids=["with-it", "without-it"])
def test_what_vllm_has_started_ends(waits, tmp_path, python_with_vllm, monkeypatch):
    """Here a process of its own, which keeps a pipe open as long as it lives. This vLLM waits for it, or does not."""
    python = python_with_vllm()
    read, write = os.pipe()
    sleep = f"[sys.executable, '-c', 'import time; time.sleep(60)'], pass_fds=[{write}]"
    with (tmp_path / "vllm.py").open("a") as fake:
        start = "run" if waits else "Popen"
        fake.write(f"import atexit, subprocess\natexit.register(lambda: subprocess.{start}({sleep}))\n")
    monkeypatch.setattr(vllm_peer, "PATIENCE", 1)
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: start(*args, **more, pass_fds=[write]))
    with vllm_peer.vllm_peer(python, "model", torch.float32, "eager", 192) as vllm:
        assert vllm.version == "9.9"
    os.close(write)
    assert select.select([read], [], [], 10)[0] and os.read(read, 1) == b""  # its last writer is gone
    os.close(read)


def test_a_vllm_that_has_loaded_or_run_is_left_alone_until_it_rests(python_with_vllm, monkeypatch):
    python, happened = python_with_vllm(), []
    answer = vllm_peer.VLLMPeer._answer
    monkeypatch.setattr(vllm_peer, "REST", 700.0)
    monkeypatch.setattr(vllm_peer.time, "sleep", happened.append)
    monkeypatch.setattr(vllm_peer.VLLMPeer, "_answer", lambda self: happened.append("answer") or answer(self))
    with vllm_peer.vllm_peer(python, "model", torch.float32, "eager", 192) as vllm:
        seconds = vllm.run([{"prompt_token_ids": [1], "max_tokens": 2}])
        assert happened == ["answer", 700.0] * 2
    assert seconds < 700  # its own, without the rest


def test_a_vllm_that_dies_and_leaves_a_process_behind_is_not_waited_for(python_with_vllm, tmp_path):
    python = python_with_vllm()
    with (tmp_path / "vllm.py").open("a") as fake:
        fake.write("import time\nLLM.generate = lambda *_, **__: os._exit(9) if os.fork() else time.sleep(600)\n")
    with (
        vllm_peer.vllm_peer(python, "model", torch.float32, "eager", 192) as vllm,
        pytest.raises(InvalidParameter, match="vLLM ended there"),
    ):
        vllm.run([{"prompt_token_ids": [1], "max_tokens": 2}])


def test_vllm_is_told_the_mode_that_its_row_names(python_with_vllm, monkeypatch, tmp_path):
    python = python_with_vllm()
    monkeypatch.setenv("MODES_LOG", str(tmp_path / "modes"))
    for mode in ("eager", "compiled"):
        with vllm_peer.vllm_peer(python, "model", torch.float32, mode, 192):
            pass
    assert (tmp_path / "modes").read_text().split() == ["True", "False"]


def test_a_python_that_says_something_of_its_own_is_quoted(options, python_with_vllm, tmp_path, capsys):
    script = tmp_path / "python.sh"
    script.write_text(f'#!/bin/sh\necho Welcome to conda\nexec {python_with_vllm()} "$@"\n')
    script.chmod(0o755)
    assert bench.main(["throughput", *options, "--peer", str(script)]) == 2
    assert "This one said 'Welcome to conda" in capsys.readouterr().err


def test_a_request_of_one_token_is_warmed_up_with_one(options, tmp_path):
    requests = [{"prompt_token_ids": list(random_prompt(191, 1)), "max_tokens": 1}]
    (tmp_path / "one.json").write_text(json.dumps({"requests": requests}))
    (report,) = found(tmp_path, "throughput", *options, "--workload", str(tmp_path / "one.json"))
    assert report["rows"][0]["tokens_per_s"] > 0


def test_a_python_without_vllm_is_quoted(options, capsys):
    assert bench.main(["throughput", *options, "--peer", sys.executable]) == 2
    assert "No module named 'vllm'" in capsys.readouterr().err


def test_a_peer_that_does_less_work_is_no_measurement(options, python_with_vllm, capsys):
    assert bench.main(["throughput", *options, "--peer", python_with_vllm(too_few_tokens=1)]) == 2
    assert "vLLM 9.9 generated" in capsys.readouterr().err


def test_nor_is_ours_if_a_request_does_not_fit(options, tmp_path, capsys):
    requests = [{"prompt_token_ids": list(random_prompt(180, 1)), "max_tokens": 50}]
    (tmp_path / "long.json").write_text(json.dumps({"requests": requests}))
    assert bench.main(["throughput", *options, "--workload", str(tmp_path / "long.json")]) == 2
    assert "minipaged generated 12 tokens of 50: is max_model_len too short" in capsys.readouterr().err


def test_a_peer_that_dies_between_two_runs_leaves_its_last_words(options, python_with_vllm, monkeypatch, capsys):
    monkeypatch.setenv("DIE_AFTER", "2")
    assert bench.main(["throughput", *options, "--repeats", "3", "--peer", python_with_vllm()]) == 2
    assert "out of luck" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"requests": []}',
        '{"requests": [{"prompt_token_ids": [1]}]}',
        '{"requests": [{"prompt_token_ids": [1], "max_tokens": "x"}]}',
        '{"requests": [{"prompt_token_ids": [1], "max_tokens": 0}]}',
        '{"requests": [{"prompt_token_ids": 1, "max_tokens": 1}]}',
    ],
)
def test_a_workload_that_is_none_is_refused_before_anything_is_loaded(tmp_path, text, capsys):
    (tmp_path / "workload.json").write_text(text)
    assert bench.main(["throughput", "--model", "/no/such", "--workload", str(tmp_path / "workload.json")]) == 2
    assert "workload = " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--repeats", "--requests"])
def test_counts_are_at_least_one(option, capsys):
    with pytest.raises(SystemExit):
        bench.main(["throughput", option, "0"])
    assert "0 is not at least 1" in capsys.readouterr().err
