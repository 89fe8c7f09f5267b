"""Ranks: the processes that one model is split over, and which share of it each holds (paper, section 4.6).

A share is as even as it can be: where the number of ranks does not divide the vocabulary or the MLP, the last rank has
less. Attention is split by whole heads, so their number must be divided; where there are fewer KV heads than ranks,
neighbours hold copies of the same one:

    8 heads, 2 KV heads, 4 ranks        rank 0     rank 1     rank 2     rank 3
                            heads       0 1        2 3        4 5        6 7
                            KV heads    0          0          1          1

The model sees no more of its fellows than the small object `Ranks`, which the worker gives to it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from minipaged.config import ModelConfig
from minipaged.errors import InvalidParameter


class Ranks(Protocol):
    """All that the model knows of its fellows. Every rank must make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, on every rank. `x` may be overwritten."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 all ranks' tensors, rank by rank; elsewhere only the own one. All have one shape."""

    def collect(self, number: int) -> list[int]:
        """Each rank's number, on every rank: for the worker, while it starts."""


class OneRank:
    """A model that is not split: nothing crosses."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def collect(self, number: int) -> list[int]:
        return [number]


ALONE = OneRank()


class Share(NamedTuple):
    """One rank's part [start, stop) of something that has `whole` of them."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of_heads(self, head_dim: int) -> Share:
        """A share of heads as one of their rows."""
        return Share(*(count * head_dim for count in self))


def split(whole: int, ranks: Ranks) -> Share:
    """Equal parts, in order; what is missing to a multiple of the number of ranks, the last part lacks."""
    width = -(-whole // ranks.size)
    return Share(min(ranks.rank * width, whole), min((ranks.rank + 1) * width, whole), whole)


def split_heads(num_heads: int, ranks: Ranks) -> Share:
    """Whole heads. With fewer (KV) heads than ranks, size / num_heads neighbours share one: those whose query heads
    read it."""
    first = ranks.rank * num_heads // ranks.size
    return Share(first, first + max(1, num_heads // ranks.size), num_heads)


def check_split(config: ModelConfig, size: int) -> None:
    """Raises InvalidParameter where a model cannot be split over `size` ranks."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if size > heads or heads % size:
        raise InvalidParameter("tensor_parallel_size", size, f"must divide the model's {heads} attention heads")
    if kv_heads % size and size % kv_heads:
        raise InvalidParameter(
            "tensor_parallel_size", size, f"must divide the model's {kv_heads} KV heads, or be a multiple of them"
        )
    for name, whole in (("vocabulary", config.vocab_size), ("MLP", config.intermediate_size)):
        if -(-whole // size) * (size - 1) >= whole:
            raise InvalidParameter("tensor_parallel_size", size, f"a {name} of {whole} leaves a rank with nothing")
