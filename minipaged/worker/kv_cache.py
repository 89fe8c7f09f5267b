"""The KV cache as tensors: for each layer one tensor of keys and one of values, cut into blocks (paper, section 4.2).

    layer.key, layer.value    [num_blocks, block_size, num_kv_heads, head_dim]

A block number means the same block in every layer, so one block table serves them all. The pool is not cleared: what no
table names may hold anything, and nobody reads it. The host's pool is one more of these, in ordinary memory, and all
moves of a plan are one operation: blocks of one pool into blocks of another, or of the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minipaged.config import ModelConfig
from minipaged.model.kv_layer import KVLayer


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """One pool, all layers. `pinned` memory of the host is what CUDA can copy from and to without a detour."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        pinned: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

        def empty() -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.layers = [KVLayer(empty(), empty()) for _ in range(config.num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)


def copy_blocks(source: KVCache, target: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """The content of blocks of one pool into blocks of another: swap out, swap in; of the same one: copy-on-write.

    `pairs` are (source block, target block): one indexed operation a tensor, however many they are.
    """
    if not pairs:
        return
    sources, targets = torch.tensor(pairs).unbind(1)
    for before, after in zip(source.layers, target.layers, strict=True):
        _copy(before.key, after.key, sources, targets)
        _copy(before.value, after.value, sources, targets)


def _copy(source: torch.Tensor, target: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """source and target [num_blocks, block_size, K, D] each, sources and targets [number of pairs]."""
    target[targets.to(target.device)] = source[sources.to(source.device)].to(target.device)
