"""GGUF metadata → config.json.

Most keys only change their names. Three things need care:

- Decimal numbers are stored as float32, so 1e-05 comes out as 9.99999974e-06. The shortest decimal with the same
  float32 is the number that was meant.
- Llama 3's rotary scaling is not stored as its four parameters: the file holds what they lead to, one divisor for each
  frequency (the tensor rope_freqs.weight). We compute the divisors of known parameters and compare.
- Keys that change the arithmetic of a Llama (experts, windows, scales) are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from minipaged.errors import BrokenCheckpoint, UnsupportedModel

# Every Llama 3 was trained with these; only the factor differs (8 for 3.1, 32 for 3.2).
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

OTHER_ARITHMETIC = (
    "llama.expert_count",
    "llama.attention.sliding_window",
    "llama.attention.scale",
    "llama.attention.clamp_kqv",
    "llama.attention.temperature_scale",
    "llama.embedding_scale",
    "llama.residual_scale",
    "llama.logit_scale",
)


def llama_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json. `tensors` are gguf's; only names and shapes matter here, and rope_freqs.weight."""
    for key in OTHER_ARITHMETIC:
        if metadata.get(key):
            raise UnsupportedModel(key, metadata[key], "a llama with this key computes something else")
    hidden_size, num_heads = _integer(metadata, "embedding_length"), _integer(metadata, "attention.head_count")
    head_dim = _integer(metadata, "attention.key_length", default=hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := _integer(metadata, key, default=head_dim)) != head_dim:
            raise UnsupportedModel(f"llama.{key}", value, f"must equal the size of a head, {head_dim}")
    eos = _end_of_sequence(metadata)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _vocab_size(metadata, tensors),
        "hidden_size": hidden_size,
        "intermediate_size": _integer(metadata, "feed_forward_length"),
        "num_hidden_layers": _integer(metadata, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer(metadata, "attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _integer(metadata, "context_length"),
        "rms_norm_eps": _decimal(metadata, "llama.attention.layer_norm_rms_epsilon", default=1e-5),
        "rope_parameters": _rope(metadata, tensors.get("rope_freqs.weight"), head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": stored_dtype(tensors),
    }


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def stored_dtype(tensors: Mapping[str, Any]) -> str:
    """What the matrices are written as: the half type they all have, else float32."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) == 2}
    return {"F16": "float16", "BF16": "bfloat16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(f"llama.{key}", default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]  # one number for each layer, all the same
    if isinstance(value, list):
        raise UnsupportedModel(f"llama.{key}", value, "layers of different shapes are not supported")
    if type(value) is not int or value <= 0:
        raise BrokenCheckpoint(f"llama.{key}", value, "must be a positive integer")
    return value


def _decimal(metadata: Mapping[str, Any], key: str, default: float) -> float:
    """The shortest decimal number whose float32 is the stored one."""
    value = metadata.get(key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise BrokenCheckpoint(key, value, "must be a positive number")
    return _shortest(value)


def _shortest(value: float) -> float:
    return float(str(numpy.float32(value)))


def _vocab_size(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> int:
    """The rows of the embedding; a vocabulary may be shorter (padding), never longer."""
    if "token_embd.weight" not in tensors:
        raise BrokenCheckpoint("token_embd.weight", None, "the file has no such tensor")
    rows = int(tensors["token_embd.weight"].shape[-1])
    if (num_tokens := len(metadata.get("tokenizer.ggml.tokens", ()))) > rows:
        raise BrokenCheckpoint("tokenizer.ggml.tokens", num_tokens, f"more tokens than the embedding has rows, {rows}")
    return rows


def _end_of_sequence(metadata: Mapping[str, Any]) -> list[int]:
    """End of sequence, of turn and of message: whatever ends an answer, each once."""
    ids = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _rope(metadata: Mapping[str, Any], rope_freqs: Any, head_dim: int) -> dict[str, Any]:
    """The rope_parameters of transformers."""
    theta = _decimal(metadata, "llama.rope.freq_base", default=10_000.0)
    kind = metadata.get("llama.rope.scaling.type", "linear")  # llama.cpp's default, with a factor of 1
    if kind not in ("none", "linear"):
        raise UnsupportedModel("llama.rope.scaling.type", kind, "supported are none and linear")
    factor = metadata.get("llama.rope.scaling.factor") or metadata.get("llama.rope.scale_linear") or 1.0
    is_linear = kind == "linear" and factor != 1.0
    if rope_freqs is not None:
        if is_linear:
            raise UnsupportedModel("llama.rope.scaling.factor", factor, "beside rope_freqs.weight it is not supported")
        return {"rope_theta": theta, **_llama3(rope_freqs.data.tolist(), theta, head_dim)}
    if is_linear:
        return {"rope_theta": theta, "rope_type": "linear", "factor": _shortest(factor)}
    return {"rope_theta": theta, "rope_type": "default"}


def _llama3(divisors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The Llama 3 parameters that lead to these divisors of the frequencies (one for each pair of a head)."""
    factor = _shortest(max(divisors))
    expected = [_llama3_divisor(theta ** (-2 * i / head_dim), factor) for i in range(head_dim // 2)]
    if len(divisors) != len(expected) or not all(map(_nearly_equal, divisors, expected)):
        raise UnsupportedModel("rope_freqs.weight", list(divisors), "only the divisors of Llama 3's scaling are known")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _nearly_equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)  # llama.cpp's converter computes in float32


def _llama3_divisor(frequency: float, factor: float) -> float:
    """Long waves are slowed by `factor`, short ones not at all, and those between by something between."""
    turns = LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)  # in the original context
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - share) / factor + share)
