"""GGUF tensors → safetensors, one tensor at a time.

Two things are more than a new name. Quantised tensors are dequantised to float32. And the rows of Q and K are put back
in order: a rotary embedding turns pairs of a head's dimensions, and the two worlds pair them differently,

    llama.cpp       (0 1) (2 3) (4 5) (6 7)         neighbours
    transformers    (0 4) (1 5) (2 6) (3 7)         halves

so llama.cpp's converter reordered each head's rows. Only the order of the rows tells the two apart: forgetting this
gives a model that speaks fluently and confuses its positions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors.torch import save_file

from minipaged.errors import BrokenCheckpoint, UnsupportedModel
from minipaged.loading.progress import progress_bar

SHARD_BYTES = 1 << 30  # so much is in memory at a time (or one tensor, where that is larger)


class Place(NamedTuple):
    """Where a GGUF tensor goes."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0  # of Q or K: how many heads' rows to put back in order


def write_weights(
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    target: Path,
    progress: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes every tensor to `target`, in one file or in shards with their index.

    `tensors` are gguf's, `config` is the content of config.json. Raises BrokenCheckpoint (a tensor is missing, or its
    shape contradicts the config) and UnsupportedModel (a tensor that no Llama has, or an unknown quantisation).
    """
    places = _places(config)
    _check(tensors, places)
    keep = config["dtype"]
    shards = _split(tensors, places, keep, shard_bytes)
    file_names = ["model.safetensors"]
    if len(shards) > 1:
        file_names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        _write_index(shards, file_names, places, target)

    total, done = sum(_num_bytes(tensors[name], keep) for name in places), 0
    with progress_bar("converting to safetensors", total, progress) as show:
        for file_name, names in zip(file_names, shards, strict=True):
            converted = {}
            for name in names:
                converted[places[name].name] = _convert(tensors[name], places[name], keep)
                done += _num_bytes(tensors[name], keep)
                show(done)
            save_file(converted, target / file_name, metadata={"format": "pt"})


def _places(config: Mapping[str, Any]) -> dict[str, Place]:
    """Every tensor that a GGUF file of this shape holds, by its GGUF name."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    places = {
        "token_embd.weight": Place("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": Place("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        places["output.weight"] = Place("lm_head.weight", (vocab, hidden))
    linears = (  # name here and there, rows, columns, heads to reorder, has a bias
        ("attn_q", "self_attn.q_proj", q_size, hidden, heads, config["attention_bias"]),
        ("attn_k", "self_attn.k_proj", kv_size, hidden, kv_heads, config["attention_bias"]),
        ("attn_v", "self_attn.v_proj", kv_size, hidden, 0, config["attention_bias"]),
        ("attn_output", "self_attn.o_proj", hidden, q_size, 0, config["attention_bias"]),
        ("ffn_gate", "mlp.gate_proj", inner, hidden, 0, config["mlp_bias"]),
        ("ffn_up", "mlp.up_proj", inner, hidden, 0, config["mlp_bias"]),
        ("ffn_down", "mlp.down_proj", hidden, inner, 0, config["mlp_bias"]),
    )
    for i in range(config["num_hidden_layers"]):
        here, there = f"blk.{i}", f"model.layers.{i}"
        places[f"{here}.attn_norm.weight"] = Place(f"{there}.input_layernorm.weight", (hidden,))
        places[f"{here}.ffn_norm.weight"] = Place(f"{there}.post_attention_layernorm.weight", (hidden,))
        for old, new, rows, columns, heads_to_reorder, has_bias in linears:
            places[f"{here}.{old}.weight"] = Place(f"{there}.{new}.weight", (rows, columns), heads_to_reorder)
            if has_bias:
                places[f"{here}.{old}.bias"] = Place(f"{there}.{new}.bias", (rows,), heads_to_reorder)
    return places


def _check(tensors: Mapping[str, Any], places: Mapping[str, Place]) -> None:
    for name in tensors:
        if name not in places and name != "rope_freqs.weight":  # that one went into the config
            raise UnsupportedModel("tensor", name, "a Llama of this shape has no such tensor")
    for name, place in places.items():
        if name not in tensors:
            raise BrokenCheckpoint("tensor", name, "the file has no such tensor")
        shape = tuple(int(size) for size in reversed(tensors[name].shape))  # GGUF writes the fastest dimension first
        if shape != place.shape:
            raise BrokenCheckpoint(name, shape, f"the file's own metadata say {place.shape}")


def _split(tensors: Mapping[str, Any], places: Mapping[str, Place], keep: str, shard_bytes: int) -> list[list[str]]:
    """The GGUF names of each shard, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in places:
        size += _num_bytes(tensors[name], keep)
        if shards[-1] and size > shard_bytes:
            shards.append([])
            size = _num_bytes(tensors[name], keep)
        shards[-1].append(name)
    return shards


def _write_index(shards: list[list[str]], file_names: list[str], places: Mapping[str, Place], target: Path) -> None:
    where = {places[name].name: file for names, file in zip(shards, file_names, strict=True) for name in names}
    index = {"metadata": {}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _num_bytes(tensor: Any, keep: str) -> int:
    return int(tensor.n_elements) * (2 if _is_kept(tensor, keep) else 4)


def _is_kept(tensor: Any, keep: str) -> bool:
    """Whether the tensor stays in the half type that all matrices of the file have."""
    return tensor.tensor_type.name == {"float16": "F16", "bfloat16": "BF16"}.get(keep)


def _convert(tensor: Any, place: Place, keep: str) -> torch.Tensor:
    """The tensor in its place's shape, float32 unless it is kept, with its heads' rows in transformers' order."""
    if _is_kept(tensor, keep):
        # numpy has no bfloat16: gguf gives its bytes
        values = torch.from_numpy(tensor.data.copy()).view(getattr(torch, keep))
    else:
        # a float32 tensor is still a read-only view of the file here, a dequantised one is not: no second copy of that
        values = torch.from_numpy(numpy.require(_dequantize(tensor), requirements="W"))
    values = values.reshape(place.shape)
    if place.heads:
        by_pairs = values.reshape(place.heads, -1, 2, *place.shape[1:])  # [H, D/2, 2, …]: neighbours
        values = by_pairs.transpose(1, 2).reshape(place.shape)  # [H, 2, D/2, …]: halves
    return values.contiguous()


def _dequantize(tensor: Any) -> numpy.ndarray:
    """The tensor in float32, exactly as llama.cpp's own package computes it."""
    from gguf import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModel(
            tensor.name, tensor.tensor_type.name, "the gguf package does not dequantise it"
        ) from error
