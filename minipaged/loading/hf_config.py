"""config.json → ModelConfig: every key that changes the arithmetic is read, or its value is refused by name.

A checkpoint that runs with one ignored key gives fluent, wrong answers, the worst kind of failure. Two errors tell the
user whose fault it is: UnsupportedModel (the model is fine, this program does not run it) and BrokenCheckpoint (the
file is not).
"""

from __future__ import annotations

import json
import math
from os import PathLike
from pathlib import Path
from typing import Any

from minipaged.config import ModelConfig, RopeConfig
from minipaged.errors import BrokenCheckpoint, ModelNotFound, UnsupportedModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
DTYPES = ("float16", "bfloat16", "float32", "float64")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BrokenCheckpoint."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise BrokenCheckpoint(path.name, str(path), f"the file is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise BrokenCheckpoint(path.name, content, "the file must hold a JSON object")
    return content


def read_model_config(path: str | PathLike[str]) -> ModelConfig:
    """The shape of the Llama in the Hugging Face directory `path`.

    Raises ModelNotFound (no such directory, no config.json), UnsupportedModel and BrokenCheckpoint.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        found = "holds no config.json" if directory.is_dir() else "does not exist"
        raise ModelNotFound("model", str(path), f"a model is a directory with a config.json, and this one {found}")
    config = read_json(directory / "config.json")
    _refuse_other_arithmetic(config)

    hidden_size, num_heads = _positive_int(config, "hidden_size"), _positive_int(config, "num_attention_heads")
    num_kv_heads = _positive_int(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise BrokenCheckpoint("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads = {num_heads}")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise BrokenCheckpoint("hidden_size", hidden_size, f"must be a multiple of num_attention_heads = {num_heads}")
    head_dim = _positive_int(config, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise BrokenCheckpoint("head_dim", head_dim, "must be even: rotary embedding turns pairs")

    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    vocab_size = _positive_int(config, "vocab_size")
    eos = generation.get("eos_token_id")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=_positive_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_positive_int(config, "max_position_embeddings"),
        rms_norm_eps=_positive_number(config, "rms_norm_eps", default=1e-6),
        rope=_rope(config),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
        eos_token_ids=_token_ids("eos_token_id", config.get("eos_token_id") if eos is None else eos, vocab_size),
        bos_token_id=next(iter(_token_ids("bos_token_id", config.get("bos_token_id"), vocab_size)), None),
        dtype=_dtype(config),
    )


def _refuse_other_arithmetic(config: dict[str, Any]) -> None:
    model_type, named = str(config.get("model_type")), config.get("architectures") or []
    if model_type not in ARCHITECTURES or any(name != ARCHITECTURES[model_type] for name in named):
        supported = " and ".join(ARCHITECTURES.values())
        raise UnsupportedModel("architecture", named or model_type, f"supported are {supported}")
    if model_type == "mistral":
        _refuse_mistral_unless_it_is_a_llama(config)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel("hidden_act", activation, "only silu is supported")
    if quantization := config.get("quantization_config"):
        raise UnsupportedModel("quantization_config", quantization, "only weights stored as numbers are supported")


def _refuse_mistral_unless_it_is_a_llama(config: dict[str, Any]) -> None:
    """A Mistral whose window never closes is a Llama; but a key that it leaves out may mean something else."""
    if "sliding_window" not in config or config["sliding_window"] is not None:
        window = _positive_int(config, "sliding_window", default=4096)
        if window < _positive_int(config, "max_position_embeddings"):
            raise UnsupportedModel("sliding_window", window, "only full attention is supported")
    if config.get("num_key_value_heads") is None:
        raise BrokenCheckpoint("num_key_value_heads", None, "a Mistral config.json must give it")


def _rope(config: dict[str, Any]) -> RopeConfig:
    """Old files have rope_theta and rope_scaling; since transformers 5 both are in rope_parameters.

    Where a file has both, transformers reads rope_scaling.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise BrokenCheckpoint("rope_parameters", parameters, "must be an object")
    everything = {**config, **parameters}
    if (part := everything.get("partial_rotary_factor")) not in (None, 1):
        raise UnsupportedModel("partial_rotary_factor", part, "only heads that are rotated whole are supported")

    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = _positive_number(everything, "rope_theta", default=10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, factor=_positive_number(parameters, "factor"))
    if kind == "llama3":
        low, high = _positive_number(parameters, "low_freq_factor"), _positive_number(parameters, "high_freq_factor")
        if low >= high:
            raise BrokenCheckpoint("low_freq_factor", low, f"must be less than high_freq_factor = {high}")
        # As in transformers: a value beside rope_parameters wins over one inside; the context length is the default.
        original = _positive_int(
            {**parameters, **config},
            "original_max_position_embeddings",
            default=_positive_int(config, "max_position_embeddings"),
        )
        return RopeConfig(kind, theta, _positive_number(parameters, "factor"), low, high, original)
    raise UnsupportedModel("rope_type", kind, "supported are default, linear and llama3")


def _positive_int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if type(value) is not int or value <= 0:
        raise BrokenCheckpoint(key, value, "config.json must give a positive integer")
    return value


def _positive_number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise BrokenCheckpoint(key, value, "config.json must give a positive number")
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise BrokenCheckpoint(key, value, "config.json must give true or false")
    return bool(value)


def _token_ids(key: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise BrokenCheckpoint(key, value, f"must be token ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _dtype(config: dict[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UnsupportedModel("dtype", dtype, f"supported are {', '.join(DTYPES)}")
    return dtype
