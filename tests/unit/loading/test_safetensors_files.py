"""Weights of a Hugging Face directory: every tensor once, and what is wrong with a checkpoint by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from minipaged.errors import BrokenCheckpoint, ModelNotFound, UnsupportedModel
from minipaged.loading import read_weights

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(2)}


def write_shards(directory, weight_map=None):
    save_file({"a": TENSORS["a"]}, directory / "model-1.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, directory / "model-2.safetensors")
    weight_map = weight_map or {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_all_there(directory):
    weights = list(read_weights(directory))
    assert sorted(name for name, _ in weights) == ["a", "b", "c"]
    for name, tensor in weights:
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])


def test_a_single_file_gives_every_tensor_as_it_is_stored(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_all_there(tmp_path)


def test_shards_give_every_tensor_once(tmp_path):
    write_shards(tmp_path)
    assert_all_there(tmp_path)


def test_a_missing_shard_is_named_before_anything_is_read(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(BrokenCheckpoint, match="model-2.safetensors"):
        read_weights(tmp_path)


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path):
    write_shards(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(BrokenCheckpoint, match="'b'.*model-1.safetensors"):
        list(read_weights(tmp_path))


@pytest.mark.parametrize("index", ["not json", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_a_broken_checkpoint(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BrokenCheckpoint, match="model.safetensors.index.json"):
        read_weights(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 60, -3])
def test_a_truncated_file_is_a_broken_checkpoint(tmp_path, length):
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:length])
    with pytest.raises(BrokenCheckpoint, match="truncated"):
        list(read_weights(tmp_path))


def test_a_pickle_is_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="pytorch_model.bin.*safetensors"):
        read_weights(tmp_path)


def test_a_directory_without_weights_is_no_model(tmp_path):
    with pytest.raises(ModelNotFound, match="model.safetensors"):
        read_weights(tmp_path)
