"""Tiny random Llamas for tests, with their transformers twins.

    tiny = tiny_llama("gqa")            a shape of SHAPES, built once in a process (in some milliseconds)
    tiny.config                         its ModelConfig
    tiny.logits([5, 3, 8])              what transformers says in float64, [3, V]
    tiny.model("gather")                our Llama with the same weights, float64
    tiny.save(tmp_path)                 a Hugging Face directory (config.json, model.safetensors; no tokenizer)

    pool = PagedPool(tiny.model("gather"), block_size=4)
    pool.feed({0: [5, 3], 1: [8]})      one ragged batch; the logits of each sequence's new tokens
    pool.feed({0: [8], 1: [2, 7, 1]})   goes on where they were

Weights are drawn wide (std 0.3), so that the models *attend*: with the usual 0.02 attention is nearly uniform, and a
bug in the KV cache changes no token. The pool is full of NaN and block tables are drawn from a shuffled free list, so a
read of the wrong slot shows.

Letters: V vocab_size, L layers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minipaged.config import ModelConfig, RopeConfig
from minipaged.model.attention import make_backend
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer
from minipaged.model.llama import Llama
from minipaged.model.weights import load_weights
from minipaged.step import SequenceWork

# The small base and context spread the few planes of a tiny head over all three bands: kept, blended, stretched.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# What each shape changes of the plain one, in transformers' names.
SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 24},  # 4 heads × 24 ≠ hidden 32
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "llama3_rope": {"rope_parameters": _LLAMA3},
}


@dataclass(frozen=True)
class TinyLlama:
    """A tiny model: its shape, transformers' float64 model of it, and that model with its float32 corners patched."""

    config: ModelConfig
    stock: LlamaForCausalLM  # transformers as it is: norm and rotary pass through float32
    twin: LlamaForCausalLM  # the same weights, computed in float64 throughout

    def weights(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors by name; a tied head is left out."""
        weights = self.stock.state_dict()
        if self.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        return weights

    def model(self, backend: str = "gather", dtype: torch.dtype = torch.float64) -> Llama:
        """Our Llama with these weights."""
        model = Llama(self.config, make_backend(backend), dtype, "cpu")
        load_weights(model, self.weights().items())
        return model

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The oracle: the twin's logits after each token of one sequence, float64 `[len, V]`."""
        with torch.inference_mode():
            return self.twin(torch.tensor([token_ids])).logits[0]

    def save(self, directory: Path | str) -> Path:
        """Write a Hugging Face directory and return its path."""
        self.stock.save_pretrained(directory)
        return Path(directory)


def tiny_llama(shape: str = "gqa", seed: int = 0, **changes: Any) -> TinyLlama:
    """A tiny float64 Llama: a shape of SHAPES, with further `changes` in the names of transformers' LlamaConfig.

    Same arguments, same weights. Without changes, the model is built once and shared: do not modify it.
    """
    return _build(shape, seed, changes) if changes else _cached(shape, seed)


@cache
def _cached(shape: str, seed: int) -> TinyLlama:
    return _build(shape, seed, {})


def _build(shape: str, seed: int, changes: Mapping[str, Any]) -> TinyLlama:
    plain = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "attn_implementation": "sdpa",
        "dtype": torch.float64,
    }
    hf_config = LlamaConfig(**{**plain, **SHAPES[shape], **changes})
    stock = LlamaForCausalLM(hf_config).double().eval()  # then to float64, so that inv_freq is computed in float32
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            parameter.normal_(generator=generator)
            parameter.copy_(1 + 0.1 * parameter if "norm" in name else 0.3 * parameter)
    return TinyLlama(model_config(hf_config), stock, in_float64_throughout(deepcopy(stock)))


def model_config(hf_config: LlamaConfig) -> ModelConfig:
    """Transformers' config of a tiny model as ours."""
    rope = hf_config.rope_parameters
    renamed = {"rope_type": "kind", "rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}
    return ModelConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=hf_config.head_dim,
        max_position=hf_config.max_position_embeddings,
        rms_norm_eps=hf_config.rms_norm_eps,
        rope=RopeConfig(**{renamed.get(name, name): value for name, value in rope.items()}),
        tie_word_embeddings=hf_config.tie_word_embeddings,
        attention_bias=hf_config.attention_bias,
        mlp_bias=hf_config.mlp_bias,
        eos_token_ids=(hf_config.eos_token_id,),
        bos_token_id=hf_config.bos_token_id,
        dtype="float64",
    )


def in_float64_throughout(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Patch this one model's RMSNorm and rotary embedding, which cast to float32 and so cost 1e-7."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

    def rotary(self: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq.double()  # inv_freq itself was computed in float32
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(norm, module)
        elif type(module).__name__ == "LlamaRotaryEmbedding":
            module.forward = MethodType(rotary, module)
    return model


class PagedPool:
    """A KV pool full of NaN, and the sequences that live in it. Stands in for scheduler, block manager and worker."""

    def __init__(self, model: Llama, block_size: int, num_blocks: int = 64, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        config = model.config
        num_kv_heads = model.model.layers[0].self_attn.k_proj.weight.shape[0] // config.head_dim  # a rank's own
        shape = (num_blocks, block_size, num_kv_heads, config.head_dim)
        dtype = model.lm_head.weight.dtype
        self.kv = [
            KVLayer(*(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))) for _ in range(config.num_layers)
        ]
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.tables: dict[int, list[int]] = {}
        self.num_computed: dict[int, int] = {}

    def feed(self, new_tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run the next tokens of several sequences as one ragged batch, rows in the mapping's order.

        Returns each sequence's logits after each of its new tokens, `[len, V]`.
        """
        rows = [self._work(seq_id, tuple(token_ids)) for seq_id, token_ids in new_tokens.items()]
        with torch.inference_mode():
            hidden = self.model(RaggedBatch.build(rows, self.block_size, "cpu"), self.kv)
            logits = self.model.compute_logits(hidden)
        per_row = logits.split([len(row.token_ids) for row in rows])
        for row in rows:
            self.num_computed[row.seq_id] += len(row.token_ids)
        return dict(zip(new_tokens, per_row, strict=True))

    def _work(self, seq_id: int, token_ids: tuple[int, ...]) -> SequenceWork:
        table = self.tables.setdefault(seq_id, [])
        start = self.num_computed.setdefault(seq_id, 0)
        while len(table) * self.block_size < start + len(token_ids):
            table.append(self.free_blocks.pop())
        return SequenceWork(seq_id, token_ids, start, tuple(table), table_version=len(table))

    def slot_of(self, seq_id: int, position: int) -> tuple[int, int]:
        """Block and offset in it of one computed token."""
        return self.tables[seq_id][position // self.block_size], position % self.block_size


def run_in_chunks(
    model: Llama, prompts: Sequence[Sequence[int]], block_size: int, chunk: int | None = None, seed: int = 0
) -> list[torch.Tensor]:
    """Each prompt's logits `[len, V]`: whole in the first step (`chunk=None`), or `chunk` tokens of each a step."""
    longest = max(len(prompt) for prompt in prompts)
    chunk = chunk or longest
    num_blocks = sum(-(-len(prompt) // block_size) for prompt in prompts) + 3
    pool = PagedPool(model, block_size, num_blocks, seed)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, longest, chunk):
        fed = {i: prompt[start : start + chunk] for i, prompt in enumerate(prompts) if start < len(prompt)}
        for i, new_logits in pool.feed(fed).items():
            logits[i].append(new_logits)
    return [torch.cat(parts) for parts in logits]


def random_prompt(length: int, seed: int, vocab_size: int = 61) -> list[int]:
    """Token ids that a tiny model knows."""
    return random.Random(seed).choices(range(vocab_size), k=length)
