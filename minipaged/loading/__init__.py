"""Where a model comes from: whatever the user names becomes one Hugging Face directory, which is then read.

    None, "default"    the embedded SmolLM2-135M-Instruct (default_model.py) ──┐ converted once,
    some/model.gguf    any llama-architecture GGUF file (gguf_file.py) ────────┤ into the cache (cache.py)
    org/name           a repository of the Hugging Face hub (hub.py) ──────────┤ fetched once, by its own client
    some/directory     as it is ───────────────────────────────────────────────┤
                                                                               ▼
                   config.json (hf_config.py)   *.safetensors (safetensors_files.py)   tokenizer.json (room `text`)

So the rest of the program knows one format only. A start that finds everything in place imports nothing slow: the
converters, with transformers and gguf behind them, are imported where they are needed.
"""

from __future__ import annotations

import os
from pathlib import Path

from minipaged.errors import ModelNotFound
from minipaged.loading.default_model import find_default_model
from minipaged.loading.hf_config import read_model_config
from minipaged.loading.hub import fetch_from_hub, is_hub_id
from minipaged.loading.safetensors_files import read_weights

__all__ = ["find_model", "read_model_config", "read_weights"]


def find_model(model: str | os.PathLike[str] | None = None, *, progress: bool = True) -> Path:
    """The Hugging Face directory of `model`, fetched or converted first where that is needed.

    `model` is None or "default", a directory, a .gguf file, or a hub id ("org/name"); what exists on the disk comes
    before the hub. Progress goes to stderr, never to stdout.

    Raises ModelNotFound, UnsupportedModel or BrokenCheckpoint.
    """
    if model is None or model == "default":
        return find_default_model(progress)
    name = os.fspath(model)
    try:
        path = Path(os.path.expanduser(name))
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name too long for a file system, a NUL in it
        raise ModelNotFound("model", name, f"is no path and no hub id ({error})") from error
    exists = exists and name != ""  # an empty name is not the current directory
    if exists and path.is_dir():
        return path
    if exists:
        return _converted(path, progress)
    if is_hub_id(name):
        return fetch_from_hub(name, progress)
    raise ModelNotFound("model", name, "there is no such file or directory, nor is it a hub id (org/name) or 'default'")


def _converted(path: Path, progress: bool) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound("model", str(path), "a file must be a .gguf file; otherwise give the model's directory")
    from minipaged.loading.gguf_file import converted_gguf

    return converted_gguf(path, progress)
