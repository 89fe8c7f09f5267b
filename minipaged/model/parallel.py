"""The layers that split over ranks (paper, section 4.6: Megatron's tensor parallelism).

Every rank runs the same model on the same tokens, with a share of every large weight:

                     rank 0          rank 1
    q, k, v, gate, up   [ rows 0…n ]    [ rows n…2n ]     column-parallel: each rank gets its own heads and MLP columns
        attention, silu                                   nothing crosses: heads do not look at each other
    o, down             [ columns ] + [ columns ]         row-parallel: partial sums, then one all-reduce

so a decoder layer costs two all-reduces, the embedding one (each rank knows its own token ids and adds zeros for the
others), and the logits one gather.

Between those, hidden states are equal on all ranks. With one rank each of these layers is what it is built on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from minipaged.model.layers import Embedding, Linear, MergedLinear
from minipaged.model.ranks import Ranks, Share, split


class Part(NamedTuple):
    """What a parameter holds of a checkpoint's tensor; `load_weights` finds it as `parameter.part`."""

    whole_shape: tuple[int, ...]
    take: Callable[[torch.Tensor], torch.Tensor]


class ColumnParallelLinear(Linear):
    """A share of the outputs: `[T, in_features]` to `[T, share.size]`. (The weight's rows, since it is transposed.)"""

    def __init__(
        self, in_features: int, share: Share, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(in_features, share.size, bias, dtype, device)
        own = slice(share.start, share.stop)
        self.weight.part = Part((share.whole, in_features), lambda weight: weight[own])
        if self.bias is not None:
            self.bias.part = Part((share.whole,), lambda bias: bias[own])


class RowParallelLinear(Linear):
    """A share of the inputs: `[T, share.size]` to the sum over all ranks, `[T, out_features]`."""

    def __init__(
        self, share: Share, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device | str, ranks: Ranks
    ) -> None:
        super().__init__(share.size, out_features, bias, dtype, device)
        self.ranks = ranks
        own = slice(share.start, share.stop)
        self.weight.part = Part((out_features, share.whole), lambda weight: weight[:, own])
        if self.bias is not None and ranks.rank > 0:  # the sum over ranks must have the bias once
            self.bias.part = Part((out_features,), torch.zeros_like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_reduce(super().forward(x))


class VocabParallelEmbedding(Embedding):
    """A share of the vocabulary: an id that is another rank's becomes a vector of zeros, and the sum has them all."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str, ranks: Ranks
    ) -> None:
        self.share = split(vocab_size, ranks)
        super().__init__(self.share.size, hidden_size, dtype, device)
        self.ranks = ranks
        own = slice(self.share.start, self.share.stop)
        self.weight.part = Part((vocab_size, hidden_size), lambda weight: weight[own])

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            return super().forward(token_ids)
        is_foreign = (token_ids < self.share.start) | (token_ids >= self.share.stop)  # [T]
        own_ids = (token_ids - self.share.start).masked_fill(is_foreign, 0)
        return self.ranks.all_reduce(super().forward(own_ids).masked_fill(is_foreign[:, None], 0))  # [T, E]


class VocabParallelHead(ColumnParallelLinear):
    """Scores of a share of the vocabulary, gathered where they are sampled: rank 0 returns `[R, vocab_size]`.

    Every other rank returns its own part, which nobody reads.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device | str, ranks: Ranks
    ) -> None:
        self.share = split(vocab_size, ranks)
        super().__init__(hidden_size, self.share, False, dtype, device)
        self.ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = super().forward(x)  # [R, share.size]
        if self.ranks.size == 1:
            return own
        width = -(-self.share.whole // self.ranks.size)  # the last rank's part is padded to it, and the padding cut off
        parts = self.ranks.gather(F.pad(own, (0, width - self.share.size)))  # each [R, width]
        return torch.cat(parts, dim=1)[:, : self.share.whole]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that this rank holds, packed ones included; tied ones count once."""
    layers = [module for module in model.modules() if isinstance(module, (Linear, MergedLinear))]
    tensors = [*model.parameters(), *(layer.bias for layer in layers if isinstance(layer, MergedLinear))]
    for layer in layers:
        tensors += layer.packed.tensors if layer.packed is not None else []
    different = {id(tensor): tensor for tensor in tensors if tensor is not None}
    return sum(tensor.numel() * tensor.element_size() for tensor in different.values())
