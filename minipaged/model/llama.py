"""Llama on a ragged batch: everything is per token, except attention, which reads the past through block tables.

    token ids ─ embedding ─▶ hidden ─▶ [ decoder layer ] × N ─▶ norm ─▶ hidden ─▶ (rows that sample) ─▶ logits

    decoder layer:  hidden + attention(norm(hidden))        attention: write this step's keys and values into the pool,
                    hidden + mlp(norm(hidden))              then let each token read its own sequence's

Modules and parameters carry the checkpoint's names (`model.layers.0.self_attn.q_proj.weight`), so that loading is a
lookup. Query, key and value projections are three layers, gate and up two; each group is one product (`MergedLinear`).

Read it with one rank in mind. Over several, the layers carry the split (parallel.py): each rank has some of the heads.

Letters: T tokens of the step, R rows that sample, E hidden_size, H heads, K KV heads, D head_dim, V vocab_size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minipaged.config import ModelConfig
from minipaged.model.attention import AttentionBackend
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer
from minipaged.model.layers import MergedLinear, RMSNorm
from minipaged.model.parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from minipaged.model.ranks import ALONE, Ranks, split, split_heads
from minipaged.model.rope import compute_cos_sin, compute_inv_freq, rotate

Device = torch.device | str


class LlamaAttention(nn.Module):
    """Grouped-query attention: H / K query heads share each of the K key and value heads."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, device: Device, ranks: Ranks
    ) -> None:
        super().__init__()
        self.backend = backend
        self.head_dim = config.head_dim
        query_rows = split_heads(config.num_heads, ranks).of_heads(config.head_dim)
        kv_rows = split_heads(config.num_kv_heads, ranks).of_heads(config.head_dim)
        common = {"bias": config.attention_bias, "dtype": dtype, "device": device}
        self.q_proj = ColumnParallelLinear(config.hidden_size, query_rows, **common)
        self.k_proj = ColumnParallelLinear(config.hidden_size, kv_rows, **common)
        self.v_proj = ColumnParallelLinear(config.hidden_size, kv_rows, **common)
        self.qkv_proj = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = RowParallelLinear(query_rows, config.hidden_size, **common, ranks=ranks)

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVLayer,
        slots: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """hidden [T, E], cos and sin [T, 1, D], slots [T] -> [T, E]. `metadata` is what the backend prepared."""
        projected = self.qkv_proj(hidden)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)  # [T, H, D], two of [T, K, D]
        # Written before anything is read: a chunk's tokens see each other, and one row may read what another writes.
        self.backend.write(kv, rotate(key, cos, sin), value, slots)
        attended = self.backend.forward(rotate(query, cos, sin), kv, metadata)  # [T, H, D]
        return self.o_proj(attended.flatten(1))  # [T, E]


class LlamaMLP(nn.Module):
    """SwiGLU: one projection decides how much of the other passes."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: Device, ranks: Ranks) -> None:
        super().__init__()
        columns = split(config.intermediate_size, ranks)
        common = {"bias": config.mlp_bias, "dtype": dtype, "device": device}
        self.gate_proj = ColumnParallelLinear(config.hidden_size, columns, **common)
        self.up_proj = ColumnParallelLinear(config.hidden_size, columns, **common)
        self.gate_up_proj = MergedLinear(self.gate_proj, self.up_proj)
        self.down_proj = RowParallelLinear(columns, config.hidden_size, **common, ranks=ranks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden)
        return self.down_proj(F.silu(gate) * up)  # [T, E]


class LlamaDecoderLayer(nn.Module):
    """One layer; all layers are the same program with other weights and another KV layer."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, device: Device, ranks: Ranks
    ) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, dtype, device)
        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(config, backend, dtype, device, ranks)
        self.post_attention_layernorm = norm()
        self.mlp = LlamaMLP(config, dtype, device, ranks)

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVLayer,
        slots: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """hidden [T, E] -> [T, E]; the other arguments are those of the attention."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, kv, slots, metadata)  # [T, E]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # [T, E]


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm: what checkpoints keep under `model.`."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, device: Device, ranks: Ranks
    ) -> None:
        super().__init__()
        self.backend = backend
        self.num_heads = split_heads(config.num_heads, ranks).size
        self.num_kv_heads = split_heads(config.num_kv_heads, ranks).size
        self.inv_freq = compute_inv_freq(config.rope, config.head_dim).to(device)  # [D/2]
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, dtype, device, ranks)
        layers = (LlamaDecoderLayer(config, backend, dtype, device, ranks) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.run_layer = LlamaDecoderLayer.__call__  # model/compile.py puts a compiled one here

    def forward(self, batch: RaggedBatch, kv: list[KVLayer]) -> torch.Tensor:
        hidden = self.embed_tokens(batch.token_ids)  # [T, E]
        metadata = self.backend.prepare(batch, self.num_heads, self.num_kv_heads, hidden.dtype)
        cos, sin = compute_cos_sin(batch.positions, self.inv_freq, hidden.dtype)  # [T, 1, D] each
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            hidden = self.run_layer(layer, hidden, cos, sin, layer_kv, batch.slots, metadata)
        return self.norm(hidden)


class Llama(nn.Module):
    """The whole model. Its weights are undefined until `load_weights` has filled them.

    Args:
        config: the model's shape.
        backend: how attention writes and reads the paged KV (`make_backend`).
        dtype: float16, bfloat16, float32 or float64.
        device: where the weights are, and the batches and KV layers must be.
        ranks: over whom the weights are split (parallel.py); without it, nothing is.
    """

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, device: Device, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, backend, dtype, device, ranks)
        self.lm_head = VocabParallelHead(config.hidden_size, config.vocab_size, dtype, device, ranks)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: RaggedBatch, kv: list[KVLayer]) -> torch.Tensor:
        """Run the batch's tokens through all layers and write their keys and values into `kv`, one entry a layer.

        Returns the final hidden state of every token, `[T, E]`. Most tokens of a prefill need no logits: choose the
        rows that do, and give those to `compute_logits`.
        """
        return self.model(batch, kv)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every vocabulary entry as the next token: `[R, E]` to `[R, V]` (on rank 0), in float32 at least."""
        logits = self.lm_head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
