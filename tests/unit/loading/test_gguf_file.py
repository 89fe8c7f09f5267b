"""A GGUF file converts to exactly the model that it was made of; what would not is refused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from minipaged.errors import BrokenCheckpoint, UnsupportedModel
from minipaged.loading import find_model, read_model_config, read_weights
from minipaged.loading.gguf_file import convert_gguf, open_gguf
from minipaged.loading.gguf_weights import write_weights
from tests.unit.loading.tiny_checkpoints import gguf_name, tiny_llama, write_gguf


def convert(tmp_path, path):
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(path, target, progress=False)
    return target


def logits(model):
    with torch.no_grad():
        return model.double()(torch.arange(40)[None] * 5 % model.config.vocab_size).logits


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_divisors(head_dim=64):
    """What llama.cpp's converter writes, after its own formula."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500_000.0 ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    return numpy.array(divisors, dtype=numpy.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "head_dim": 32},
    ],
    ids=["mha", "mqa", "biases", "tied, wide heads"],
)
def test_a_converted_model_has_the_logits_of_the_original(tmp_path, changes):
    original = tiny_llama(**changes)
    target = convert(tmp_path, write_gguf(tmp_path / "m.gguf", original))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)), logits(original))


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path):
    original = tiny_llama(head_dim=64, rope_parameters=LLAMA3)
    path = write_gguf(tmp_path / "m.gguf", original, tensors={"rope_freqs.weight": llama3_divisors()})
    target = convert(tmp_path, path)
    assert json.loads((target / "config.json").read_text())["rope_parameters"] == LLAMA3
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)), logits(original))


def test_other_divisors_are_refused(tmp_path):
    divisors = llama3_divisors()
    divisors[20] *= 1.01
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(head_dim=64), tensors={"rope_freqs.weight": divisors})
    with pytest.raises(UnsupportedModel, match="rope_freqs.weight"):
        convert(tmp_path, path)


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_linear_scaling_is_kept(tmp_path, key):
    original = tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5})
    target = convert(tmp_path, write_gguf(tmp_path / "m.gguf", original, metadata={key: 2.5}))
    assert read_model_config(target).rope.factor == 2.5
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)), logits(original))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_tensors_are_dequantised_exactly_as_gguf_does(tmp_path, kind):
    model = tiny_llama()
    target = convert(tmp_path, write_gguf(tmp_path / "m.gguf", model, kind))
    quantization = gguf.GGMLQuantizationType[kind]
    dequantised = {
        gguf_name(name): gguf.dequantize(gguf.quantize(tensor.numpy(), quantization), quantization)
        for name, tensor in model.state_dict().items()
        if tensor.ndim == 2
    }  # rows are quantised one by one, so their order does not matter
    assert read_model_config(target).dtype == "float32"
    for name, tensor in read_weights(target):
        if tensor.ndim == 2:
            assert tensor.dtype == torch.float32
            assert numpy.array_equal(tensor.numpy(), dequantised[gguf_name(name)]), name


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_types_are_kept(tmp_path, kind, dtype):
    model = tiny_llama()
    target = convert(tmp_path, write_gguf(tmp_path / "m.gguf", model, kind))
    assert read_model_config(target).dtype == str(dtype).removeprefix("torch.")
    for name, tensor in read_weights(target):
        wanted = model.state_dict()[name].to(dtype if tensor.ndim == 2 else torch.float32)
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted), name


def test_half_types_among_others_become_float32(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), "Q8_0", kinds={"token_embd.weight": "F16"})
    target = convert(tmp_path, path)
    assert read_model_config(target).dtype == "float32"
    assert {tensor.dtype for _, tensor in read_weights(target)} == {torch.float32}


def test_a_large_model_is_written_in_shards(tmp_path):
    model, target = tiny_llama(), tmp_path / "converted"
    target.mkdir()
    file = open_gguf(write_gguf(tmp_path / "m.gguf", model))
    config = {**model.config.to_dict(), "dtype": "float32"}
    write_weights(file.tensors, config, target, progress=False, shard_bytes=100_000)
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 110_000 for shard in shards)
    weights = dict(read_weights(target))
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_the_config_holds_the_decimals_that_were_meant_and_every_end_of_answer(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), metadata={"tokenizer.ggml.eot_token_id": 0})
    config = read_model_config(convert(tmp_path, path))
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (2, 0)
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    ("error", "named", "changes"),
    [
        (UnsupportedModel, "gemma2", {"architecture": "gemma2"}),
        (UnsupportedModel, "llama.expert_count", {"metadata": {"llama.expert_count": 8}}),
        (UnsupportedModel, "split.count", {"metadata": {"split.count": 2}}),
        (UnsupportedModel, "yarn", {"metadata": {"llama.rope.scaling.type": "yarn"}}),
        (UnsupportedModel, "rope.dimension_count", {"metadata": {"llama.rope.dimension_count": 8}}),
        (UnsupportedModel, "blk.0.attn_q_norm", {"tensors": {"blk.0.attn_q_norm.weight": numpy.ones(16, "float32")}}),
        (BrokenCheckpoint, "blk.1.ffn_up.weight", {"tensors": {"blk.1.ffn_up.weight": None}}),
        (
            BrokenCheckpoint,
            "blk.1.ffn_up.weight",
            {"tensors": {"blk.1.ffn_up.weight": numpy.ones((96, 32), "float32")}},
        ),
        (BrokenCheckpoint, "llama.block_count", {"metadata": {"llama.block_count": None}}),
        (BrokenCheckpoint, "token_embd.weight", {"tensors": {"token_embd.weight": None}}),
    ],
)
def test_what_is_not_exactly_a_llama_is_refused_by_name(tmp_path, error, named, changes):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), **changes)
    with pytest.raises(error, match=named):
        convert(tmp_path, path)
    assert not list(tmp_path.glob("converted/*.safetensors"))


def test_a_gguf_file_truncated_anywhere_is_a_broken_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "cache"))
    whole = write_gguf(tmp_path / "whole.gguf", tiny_llama()).read_bytes()
    for length in (0, 3, 10, 100, 2000, 5000, len(whole) // 2, len(whole) - 40):
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenCheckpoint, match="truncated"):
            find_model(path, progress=False)
    assert not list((tmp_path / "cache").glob("*/*/"))


def test_a_missing_gguf_package_says_what_to_install(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModel, match=r"pip install 'minipaged\[gguf\]'"):
        open_gguf(path)


def test_a_gguf_file_is_converted_once_and_anew_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    first = find_model(path, progress=False)
    (first / "mark").touch()
    assert find_model(path, progress=False) == first
    assert (first / "mark").exists()
    size = path.stat().st_size
    write_gguf(path, tiny_llama(), metadata={"tokenizer.ggml.eos_token_id": 0})
    assert path.stat().st_size == size
    assert read_model_config(find_model(path, progress=False)).eos_token_ids == (0,)


@pytest.mark.slow
def test_programs_that_convert_at_once_agree_although_one_is_killed_in_the_middle(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=8))
    command = [sys.executable, "-c", f"from minipaged.loading import find_model; print(find_model({str(path)!r}))"]
    environment = {**os.environ, "MINIPAGED_CACHE": str(tmp_path / "cache")}

    def start():
        root = Path(__file__).parents[3]
        return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)

    victim = start()
    while not list(tmp_path.glob("cache/*/*.building/config.json")):
        assert victim.poll() is None
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert [found.name.split(".")[-1] for found in tmp_path.glob("cache/*/*")].count("building") == 1
    outputs = [program.communicate()[0].strip() for program in [start(), start()]]
    assert outputs[0] == outputs[1]
    assert read_model_config(outputs[0]).num_layers == 8
    assert sum(1 for _ in read_weights(outputs[0])) == 8 * 9 + 3
    assert not list(tmp_path.glob("cache/*/*.building"))
