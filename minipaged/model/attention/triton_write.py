"""The KV write in Triton (the paper's block write, section 5.1): new keys and values into their slots, in one launch.

Between tokens nothing is shared, so each is a program's work; a wide one, with more than `PIECE` numbers, is several's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minipaged.model.kv_layer import KVLayer

PIECE = 1024  # numbers that a program moves of a key, and as many of the value


def write(layer: KVLayer, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """key and value `[T, K, D]`, slots `[T]`; all contiguous."""
    size = key.shape[1] * key.shape[2]
    write_slots[(len(slots), triton.cdiv(size, PIECE))](*layer, key, value, slots, SIZE=size, PIECE=PIECE)


@triton.jit
def write_slots(
    key_pool,
    value_pool,  # [num_slots, K * D], which is one layer's pool
    key,
    value,  # [T, K * D]
    slots,  # [T]
    SIZE: tl.constexpr,  # K * D
    PIECE: tl.constexpr,
):
    """Program (token, piece of its keys and values)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    numbers = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_real = numbers < SIZE
    tl.store(key_pool + slot * SIZE + numbers, tl.load(key + token * SIZE + numbers, mask=is_real), mask=is_real)
    tl.store(value_pool + slot * SIZE + numbers, tl.load(value + token * SIZE + numbers, mask=is_real), mask=is_real)
