"""What an engine is made of, as plain data: the model's shape, the pools' sizes, the scheduler's limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: how positions become angles. `kind` is default, linear or llama3."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear and llama3: by how much the context was stretched
    low_freq_factor: float = 1.0  # llama3 alone, as are the next two
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama. Read from config.json by `loading`, checked against the weights when they are read."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"  # what the checkpoint is stored in


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step. The engine makes sure that max_num_batched_tokens ≥ max_num_seqs: every decode fits."""

    max_num_seqs: int = 256  # sequences that run at the same time
    max_num_batched_tokens: int = 2048  # tokens fed in one step, over all sequences
    enable_chunked_prefill: bool = True  # without it a prompt is fed whole, or not yet
    chunk_border: int = 1  # chunks end at multiples of this; with a prefix cache, the block size
    preemption_mode: str = "auto"  # recompute, swap, or auto: swap what has several sequences
