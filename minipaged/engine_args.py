"""The arguments of `LLM(...)`, vLLM's names, each checked once. What is not supported is refused by name."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from minipaged.checks import Check, check_fields, flag, integer, number, one_of, optional, refuse_unknown
from minipaged.config import SchedulerConfig
from minipaged.errors import InvalidParameter

PREEMPTION_MODES = ("auto", "recompute", "swap")
DTYPES = ("auto", "float16", "bfloat16", "float32", "float64")
DEFAULT_BATCHED_TOKENS = 2048


def _model(field: str, value: Any) -> str | os.PathLike[str] | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise InvalidParameter(field, value, "must be a path, a hub id, or None for the default model")
    return value


def _dtype(field: str, value: Any) -> str:
    """torch.float32 prints as "torch.float32", so scripts may pass either."""
    name = str(value).removeprefix("torch.")
    return one_of(DTYPES)(field, name if str(value).startswith("torch.") else value)


def _name(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(field, value, "must be a string")
    return value


_COUNT = integer("must be an integer, at least 1", lambda v: v >= 1)

_CHECKS: dict[str, Check] = {
    "model": _model,
    "skip_tokenizer_init": flag,
    "dtype": _dtype,
    "block_size": _COUNT,
    "max_model_len": optional(_COUNT),
    "max_num_seqs": _COUNT,
    "max_num_batched_tokens": optional(_COUNT),
    "enable_chunked_prefill": flag,
    "num_gpu_blocks_override": optional(_COUNT),
    "kv_cache_memory_bytes": optional(_COUNT),
    "gpu_memory_utilization": number("must be a number above 0, at most 1", lambda v: 0 < v <= 1),
    "attention_backend": _name,
    "device": _name,
    "seed": integer("must be an integer of 64 bits", lambda v: -(2**63) <= v < 2**64),
    "enable_prefix_caching": flag,
    "preemption_mode": one_of(PREEMPTION_MODES),
    "swap_space": number("must be a number of GiB, at least 0", lambda v: 0 <= v < math.inf),
    "tensor_parallel_size": optional(_COUNT),
    "enforce_eager": flag,
}


@dataclass(frozen=True)
class EngineArgs:
    """What an engine is built from.

    model                   a Hugging Face directory, a hub id, a GGUF file; None is the embedded default model
    tokenizer               a directory or a transformers tokenizer, where it is not the model's own
    skip_tokenizer_init     no tokenizer: prompts are token ids, and outputs have no text
    dtype                   of weights and KV; "auto" is the checkpoint's own
    device                  "auto" is CUDA where there is one, else the CPU
    block_size              tokens in a KV block
    max_model_len           the longest prompt plus output; None is the model's own limit
    max_num_seqs            sequences that run at the same time
    max_num_batched_tokens  tokens fed in one step
    enable_chunked_prefill  whether a prompt may be fed in pieces; without it, it waits until it fits into a step
    num_gpu_blocks_override the pool's size in blocks, whatever memory there is (on any device; the name is vLLM's)
    kv_cache_memory_bytes   each rank's pool in bytes; None on a CPU is 1 GiB, or what max_model_len tokens need if more
    gpu_memory_utilization  on CUDA, the share of the card's memory for weights, activations and pool together
    preemption_mode         "swap" moves a preempted request's blocks to host memory, "recompute" computes them again;
                            "auto" swaps requests of several sequences (samples, beams) and recomputes single ones
    swap_space              GiB of host memory to swap to; where it is full, requests are recomputed
    enable_prefix_caching   whether full blocks outlive their requests, for later ones that begin with the same tokens
    tensor_parallel_size    how many ranks share the work of each layer; None is as many as torchrun has started, else 1
    seed                    requests without a seed of their own get one from this and their number
    attention_backend       "reference", "gather", "compiled", "triton"; "auto" is "gather", or "compiled" when compiled
    enforce_eager           False compiles the model: half a minute the first time, some seconds when that is cached
    """

    model: str | os.PathLike[str] | None = None
    tokenizer: Any = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    seed: int = 0
    attention_backend: str = "auto"
    enable_prefix_caching: bool = False
    preemption_mode: str = "auto"
    swap_space: float = 1.0
    tensor_parallel_size: int | None = 1
    enforce_eager: bool = True

    def __new__(cls, *args: Any, **given: Any) -> EngineArgs:
        """Refuse, by name, the options that vLLM has and minipaged has not."""
        refuse_unknown(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, _CHECKS)

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The limits of a step; raises InvalidParameter where they contradict each other."""
        batched = self.max_num_batched_tokens
        if batched is None:
            batched = max(DEFAULT_BATCHED_TOKENS, self.max_num_seqs)
            if not self.enable_chunked_prefill:
                batched = max(batched, max_model_len)
        if batched < self.max_num_seqs:
            raise InvalidParameter(
                "max_num_batched_tokens",
                batched,
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that every decode fits into a step",
            )
        if not self.enable_chunked_prefill and batched < max_model_len:
            raise InvalidParameter(
                "max_num_batched_tokens",
                batched,
                f"must be at least max_model_len ({max_model_len}) where enable_chunked_prefill is False",
            )
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=batched,
            enable_chunked_prefill=self.enable_chunked_prefill,
            chunk_border=self.block_size if self.enable_prefix_caching else 1,
            preemption_mode=self.preemption_mode,
        )
