"""What every way of attending over paged KV has in common.

A layer's keys and values pass through the backend twice: `write` puts the step's new ones into their slots, then
`forward` reads, and finds the row's own among the rest. What depends only on the batch (indices, masks) a backend works
out in `prepare`, once a step; the other two run once a layer. Where slots are is decided elsewhere, so most backends
have nothing of their own to say about writing, and inherit it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from minipaged.config import ModelConfig
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over paged KV. The KV layers' device and dtype are the query's."""

    name: str

    def check_can_run(
        self, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Raise InvalidParameter, naming the field, where such a model or pool is not for this backend.

        It is asked before any weight is read. Most backends take everything.
        """

    def prepare(self, batch: RaggedBatch, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> Any:
        """Work out once what all layers of this step share. Only the same backend's `forward` reads the result.

        The numbers of heads, H and K, and the dtype are those that `forward` and the KV layers will have. The heads are
        those of one rank.
        """

    def write(self, layer: KVLayer, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the step's new keys and values `[T, K, D]` at `slots` `[T]`. It comes before `forward`."""
        layer.write(key, value, slots)

    def forward(self, query: torch.Tensor, layer: KVLayer, metadata: Any) -> torch.Tensor:
        """Attend: query `[T, H, D]` to output `[T, H, D]`. Each token sees its own sequence up to itself."""
