"""The layers with weights: embedding, linear, RMSNorm. They know nothing of sequences, only of a list of T tokens.

Weights are allocated empty and filled once, by `load_weights`; drawing them at random first, as `torch.nn.Linear` does,
would only cost a user time. Each parameter is laid out and named as the checkpoint's tensor is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minipaged.model.packed import PackedWeight, can_pack, pack


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Memory for weights that are still to come."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Embedding(nn.Module):
    """Token ids `[T]` to vectors `[T, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class Linear(nn.Module):
    """`x @ weight.T + bias`: `[T, in_features]` to `[T, out_features]`."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        self.packed: PackedWeight | None = None

    def pack(self, keep_plain: bool = False) -> None:
        """Keep the weight in the CPU library's own layout, where there is one. `weight` is None from then on."""
        if self.weight is not None and can_pack(self.weight):
            self.packed = pack(self.weight, keep_plain)
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.multiply(x, self.bias)
        return F.linear(x, self.weight, self.bias)


class MergedLinear(nn.Module):
    """Linear layers that read the same input: once packed, one product does the work of all.

    The layers stay where they are, under the names of their checkpoint; this one only knows them.
    """

    def __init__(self, *layers: Linear) -> None:
        super().__init__()
        self.layers = layers  # a tuple, whose members are not registered a second time
        self.widths = [layer.weight.shape[0] for layer in layers]
        self.packed: PackedWeight | None = None
        self.bias: torch.Tensor | None = None

    def pack(self, keep_plain: bool = False) -> None:
        """As `Linear.pack`, for all the layers together."""
        if self.packed is not None or not can_pack(self.layers[0].weight):
            return
        self.packed = pack(torch.cat([layer.weight for layer in self.layers]), keep_plain)
        if self.layers[0].bias is not None:
            self.bias = torch.cat([layer.bias for layer in self.layers])
        for layer in self.layers:
            layer.weight = layer.bias = None

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [T, in_features] -> each layer's [T, out_features]."""
        if self.packed is None:
            return [layer(x) for layer in self.layers]
        return list(self.packed.multiply(x, self.bias).split(self.widths, dim=-1))


class RMSNorm(nn.Module):
    """Scale every vector of `[T, hidden_size]` to a root mean square of 1, then by the weight.

    The mean is taken in float32 at least; the result is cast back *before* the weight is applied, as in transformers,
    which in half precision is another number than casting afterwards.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = empty_parameter(hidden_size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.rms_norm(wide, wide.shape[-1:], eps=self.eps)
        return normed.to(x.dtype) * self.weight
