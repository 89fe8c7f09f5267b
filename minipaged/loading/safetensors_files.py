"""The weights of a Hugging Face directory, one tensor at a time.

A safetensors file is a small table of contents and then raw bytes, so it is mapped into memory and not read: a tensor
costs nothing until it is copied to its place in the model, with the model's dtype, and its pages can go again. Nothing
is held twice. Large checkpoints are several such files (shards) with an index that says which tensor is in which.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minipaged.errors import BrokenCheckpoint, ModelNotFound, UnsupportedModel
from minipaged.loading.hf_config import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_weights(path: str | PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of the checkpoint in directory `path`, in the dtype and shape in which it is stored.

    The tensors are views of mapped files: copy what you keep. Raises ModelNotFound (no weights), UnsupportedModel (only
    a pickle) and BrokenCheckpoint (a shard missing, a file truncated).
    """
    shards = _shards(Path(path))
    for shard in shards:
        if not shard.is_file():
            raise BrokenCheckpoint(INDEX_FILE, shard.name, f"the index names this file, but it is not in {path}")
    return chain.from_iterable(_read_shard(shard, names) for shard, names in shards.items())


def _shards(directory: Path) -> dict[Path, list[str] | None]:
    """Each file with the tensors that the index expects in it (None: whatever it holds)."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: None}
    if not (directory / INDEX_FILE).is_file():
        raise _no_weights(directory)
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise BrokenCheckpoint(INDEX_FILE, weight_map, "its weight_map must map tensor names to file names")
    shards: dict[Path, list[str] | None] = {directory / shard: [] for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        shards[directory / shard].append(name)
    return shards


def _read_shard(shard: Path, names: list[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        file = safe_open(shard, framework="pt")
    except SafetensorError as error:
        raise BrokenCheckpoint(shard.name, str(shard), f"truncated or not a safetensors file ({error})") from error
    with file:
        held = set(file.keys())
        for name in names if names is not None else sorted(held):
            if name not in held:
                raise BrokenCheckpoint(INDEX_FILE, name, f"the index places this tensor in {shard.name}, wrongly")
            yield name, file.get_tensor(name)


def _no_weights(directory: Path) -> ModelNotFound | UnsupportedModel:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in directory.glob(pattern))
    if pickles:
        return UnsupportedModel("model", pickles[0], "a pickle can run code when it is read: convert it to safetensors")
    return ModelNotFound("model", str(directory), f"the directory holds neither {SINGLE_FILE} nor {INDEX_FILE}")
