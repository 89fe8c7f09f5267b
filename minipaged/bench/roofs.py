"""The machine's roofs, measured in the same run as what is held against them: arithmetic, and reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from minipaged.config import ModelConfig

REPEATS = 5


def gflops(dtype: torch.dtype) -> float:
    """Of a large matrix product, the best of a few, in 10⁹ multiplications and additions a second."""
    size = 2048
    left, right = torch.randn(2, size, size).to(dtype)
    return 2 * size**3 / _best(lambda: left @ right) / 1e9


def gbytes_per_second() -> float:
    """Of reading half a GiB once, more than any cache of a small machine."""
    data = torch.ones(2**27)
    return data.nbytes / _best(data.sum) / 1e9


def weights_read(config: ModelConfig) -> int:
    """How many weights a token that is sampled from is multiplied with: all layers, and the head."""
    return layer_weights(config) + config.vocab_size * config.hidden_size


def gflop(config: ModelConfig, num_tokens: int, num_sampled: int) -> float:
    """10⁹ operations: every token goes through the layers, few of them need the head. Each weight costs two."""
    head = config.vocab_size * config.hidden_size
    return 2 * (layer_weights(config) * num_tokens + head * num_sampled) / 1e9


def layer_weights(config: ModelConfig) -> int:
    """The weights of all linear layers."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp)


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
