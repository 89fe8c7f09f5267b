"""A GGUF file (llama.cpp's format) → a Hugging Face directory, once.

A GGUF file is a whole model in one file: metadata (shape, tokenizer, chat template) and tensors, often quantised.
Converting it keeps the rest of the program free of a second format, at the price of disk space. Four parts:

    this file           opening it, and the order of work
    gguf_config.py      metadata → config.json, generation_config.json
    gguf_tokenizer.py   metadata → tokenizer.json and its companions
    gguf_weights.py     tensors  → *.safetensors
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minipaged.errors import BrokenCheckpoint, UnsupportedModel
from minipaged.loading.cache import converted_directory, make_once
from minipaged.loading.gguf_config import generation_config, llama_config
from minipaged.loading.gguf_tokenizer import write_tokenizer
from minipaged.loading.gguf_weights import write_weights


@dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file says. The tensors (gguf's ReaderTensor) are views of the mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]


def require_gguf(model: str) -> None:
    """Raises UnsupportedModel where the gguf package, an extra, is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UnsupportedModel(
            "model", model, "a GGUF file needs the gguf package: pip install 'minipaged[gguf]'"
        ) from error


def open_gguf(path: Path) -> GGUFFile:
    """Raises BrokenCheckpoint (truncated, not a GGUF file) and UnsupportedModel (not a llama)."""
    require_gguf(str(path))
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, TypeError, OverflowError) as error:  # the reader meets the end wherever it stands
        raise BrokenCheckpoint("model", str(path), f"truncated, or not a GGUF file ({error})") from error
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel("general.architecture", architecture, "of GGUF files only llama is supported")
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel("split.count", metadata["split.count"], "join the parts first: llama-gguf-split --merge")
    if reader.byte_order == "S":
        raise UnsupportedModel("model", str(path), "the file has the other byte order than this machine")
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def converted_gguf(path: Path, progress: bool) -> Path:
    """The converted directory of `path` in the cache, made on first use.

    A file is known by where it is, its size and its time, so that a start need not read gigabytes to hash them.
    """
    resolved, status = path.resolve(), path.stat()
    identity = hashlib.sha256(f"{resolved}\n{status.st_size}\n{status.st_mtime_ns}".encode()).hexdigest()[:12]
    return make_once(
        converted_directory(f"{resolved.stem}-{identity}"),
        partial(convert_gguf, resolved, progress=progress),
    )


def convert_gguf(path: Path, target: Path, progress: bool) -> None:
    """Fills the empty directory `target` with the model in `path`. Refusals come before the weights are written."""
    gguf = open_gguf(path)
    config = llama_config(gguf.metadata, gguf.tensors)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = generation_config(config)
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(gguf.metadata, target)
    write_weights(gguf.tensors, config, target, progress)
