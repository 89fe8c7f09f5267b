"""Tiny Llamas, and the GGUF files that llama.cpp's converter would make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ hello", "1 2", "Ċ Ċ"]
TOKENS = CONTROL + BYTES + ["".join(merge.split(" ")) for merge in MERGES]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    shape = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours + ".", theirs + ".")
    return name


def to_neighbours(rows: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Row by row: where a head has pair j in rows j and j + D/2, llama.cpp has it in rows 2j and 2j + 1."""
    head_dim = len(rows) // heads
    permuted = numpy.empty_like(rows)
    for head in range(heads):
        for j in range(head_dim // 2):
            permuted[head * head_dim + 2 * j] = rows[head * head_dim + j]
            permuted[head * head_dim + 2 * j + 1] = rows[head * head_dim + j + head_dim // 2]
    return permuted


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, numpy.ndarray]:
    config, tensors = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if "q_proj" in name:
            values = to_neighbours(values, config.num_attention_heads)
        if "k_proj" in name:
            values = to_neighbours(values, config.num_key_value_heads)
        tensors[gguf_name(name)] = values
    return tensors


def gguf_metadata(model: LlamaForCausalLM) -> dict[str, Any]:
    config = model.config
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, numpy.ndarray | None] | None = None,
    kinds: dict[str, str] | None = None,
    architecture: str = "llama",
) -> Path:
    """`kind` is that of the matrices, `kinds` says otherwise by name; None as a value leaves a key or tensor out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**gguf_metadata(model), **(metadata or {})}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    for name, values in {**gguf_tensors(model), **(tensors or {})}.items():
        if values is None:
            continue
        wanted = (kinds or {}).get(name, kind if values.ndim == 2 else "F32")
        quantization = gguf.GGMLQuantizationType[wanted]
        writer.add_tensor(name, gguf.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
