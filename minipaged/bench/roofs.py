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
    """How many weights one token is multiplied with: all linear layers and the head. Each costs two operations."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
