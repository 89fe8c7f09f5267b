"""The KV cache as tensors: for each layer one tensor of keys and one of values, cut into blocks (paper, section 4.2).

    layer.key, layer.value    [num_blocks, block_size, num_kv_heads, head_dim]

A block number means the same block in every layer, so one block table serves them all. The pool is not cleared: what no
table names may hold anything, and nobody reads it. Letters: N blocks, B block_size.
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
    """The device pool of all layers."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.layers = [
            KVLayer(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy-on-write: the content of each source block into its destination, one indexed operation a tensor."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, device=self.layers[0].key.device).unbind(1)
        for layer in self.layers:
            layer.key[destinations] = layer.key[sources]
            layer.value[destinations] = layer.value[sources]
