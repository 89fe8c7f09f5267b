"""Block moves, bit by bit."""

from __future__ import annotations

import pytest
import torch

from minipaged.config import ModelConfig
from minipaged.worker.kv_cache import KVCache, copy_blocks

CONFIG = ModelConfig(61, 32, 48, 2, 4, 2, 8, 256)


def make_cache(num_blocks, dtype=torch.float32):
    cache = KVCache(CONFIG, num_blocks, 4, dtype, torch.device("cpu"))
    for layer in cache.layers:
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape))
    return cache


def content(cache):
    return [tensor.clone() for layer in cache.layers for tensor in layer]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_swapping_out_and_in_moves_keys_and_values_of_all_layers_bit_by_bit(dtype):
    """The pairs are those of vLLM's test of its swap kernel."""
    device, host = make_cache(100, dtype), make_cache(100, dtype)
    before, host_before = content(device), content(host)
    copy_blocks(device, host, [(3, 72), (56, 35), (84, 34)])
    copy_blocks(host, device, [(19, 45), (67, 23), (12, 78), (40, 99), (1, 71)])
    for old, new, host_old, host_new in zip(before, content(device), host_before, content(host), strict=True):
        assert torch.equal(host_new[[72, 35, 34]], old[[3, 56, 84]])
        assert torch.equal(new[[45, 23, 78, 99, 71]], host_old[[19, 67, 12, 40, 1]])
        untouched = [block for block in range(100) if block not in (45, 23, 78, 99, 71)]
        assert torch.equal(new[untouched], old[untouched])


def test_keys_stay_keys_and_values_stay_values():
    """A swap that mixes them up (vllm-ascend #8105) would still move every bit somewhere."""
    device, host = make_cache(2), make_cache(2)
    copy_blocks(device, host, [(0, 1)])
    for ours, theirs in zip(device.layers, host.layers, strict=True):
        assert torch.equal(theirs.key[1], ours.key[0])
        assert torch.equal(theirs.value[1], ours.value[0])
        assert not torch.equal(theirs.key[1], ours.value[0])


def test_copies_inside_a_pool_all_read_before_any_writes():
    cache = make_cache(6)
    before = content(cache)
    copy_blocks(cache, cache, [(0, 3), (0, 4), (1, 5)])
    for old, new in zip(before, content(cache), strict=True):
        assert torch.equal(new[[3, 4, 5]], old[[0, 0, 1]])
        assert torch.equal(new[:3], old[:3])
