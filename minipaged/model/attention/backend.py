"""What every way of reading paged KV has in common.

A backend never writes: by the time it runs, the step's keys and values are in the pool, the row's own among them. What
depends only on the batch (indices, masks) it works out in `prepare`, once a step; `forward` runs once a layer.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over paged KV. The KV layers' device and dtype are the query's."""

    name: str

    def prepare(self, batch: RaggedBatch) -> Any:
        """Work out once what all layers of this step share. Only the same backend's `forward` reads the result."""

    def forward(self, query: torch.Tensor, layer: KVLayer, metadata: Any) -> torch.Tensor:
        """Attend: query `[T, H, D]` to output `[T, H, D]`. Each token sees its own sequence up to itself."""
