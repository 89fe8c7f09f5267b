"""What the Triton kernels for decodes and for prefills share: some queries, and a stretch of one sequence's context.

A Triton kernel is written for one *program*, which works on small tiles of tensors; the GPU runs thousands of programs
at once. Here a program has M queries, which all look at the same KV head of the same sequence, and walks along the
context tile by tile. It never sees the whole context, so it keeps the running softmax of reference.py:

    block table (9, 2, 5)            tile:  slots  0 … 15 of block 9    the 1st look-up
                                            slots 16 … 31 of block 9    the same
                                            slots  0 … 15 of block 2    the 2nd
                                            …

A tile is a block, or a power of two less, so one look-up in the block table says where the whole tile lies. This is why
block sizes are powers of two here. It must be small: a program has some tens of kilobytes of fast memory.

Products of half types are taken in that type, by the GPU's matrix units, and summed in float32. Those of float32 are
true float32: rounding the factors to TF32, as the units would like to, costs three digits.

The letters of all the kernels: M queries of a program (at least 16, the least that the matrix units take), S slots of a
tile, B block_size, H heads, K KV heads, G = H / K, D head_dim. The tensors are contiguous. Sizes of a tile must be
powers of two, so D is padded to one (80 to 128), and masked. All offsets are int64, for a pool may have more than 2³¹
elements: whatever is read from a table is int64 already, and makes the products so.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_BYTES = 16384  # of keys, and as many of values; two of each are on their way at a time


@triton.jit
def attend(
    query,  # [M, D padded], zeros where padded
    positions,  # [M] the last position that each query may see; it lies before `end`
    begin,
    end,  # the positions to read: at least one; `begin` starts a tile, and every query may see it
    table,  # where the sequence's block table begins
    key_pool,
    value_pool,  # one layer's [num_blocks, B, K, D]
    kv_head,
    scale,  # 1 / sqrt(D)
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32 whatever the dtype; see `widens`
):
    """Returns the numerator `[M, D padded]`, and the largest score and the denominator `[M]`, all in float32."""
    dims = tl.arange(0, query.shape[1])
    is_dim = dims < HEAD_DIM
    largest = tl.full((query.shape[0],), float("-inf"), tl.float32)  # [M]
    denominator = tl.zeros((query.shape[0],), tl.float32)  # [M] sum of exp(score - largest)
    numerator = tl.zeros(query.shape, tl.float32)  # [M, D] sum of exp(score - largest) * value
    if WIDEN:
        query = query.to(tl.float32)

    for first in range(begin, end, TILE):
        block = tl.load(table + first // BLOCK_SIZE)
        key_positions = first + tl.arange(0, TILE)  # [S]
        slots = block * BLOCK_SIZE + key_positions % BLOCK_SIZE  # [S]
        at = ((slots * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims[None, :]  # [S, D]
        # A slot past the end may hold NaN, and 0 * NaN is NaN: it must not be loaded, a weight of 0 is not enough.
        is_filled = (key_positions < end)[:, None] & is_dim[None, :]
        key = tl.load(key_pool + at, mask=is_filled, other=0.0)
        value = tl.load(value_pool + at, mask=is_filled, other=0.0)
        if WIDEN:
            key, value = key.to(tl.float32), value.to(tl.float32)

        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [M, S]
        scores = tl.where(key_positions[None, :] <= positions[:, None], scores, float("-inf"))

        # From the first tile on, each query has seen a key, so `largest` is finite.
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])  # [M, S]
        denominator = denominator * shrink + tl.sum(weights, axis=1)
        numerator = numerator * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = new_largest

    return numerator, largest, denominator


IS_INTERPRETED = not isinstance(attend, triton.JITFunction)  # TRITON_INTERPRET=1 stood in the environment


def widens(dtype) -> bool:
    """Triton's interpreter has no bfloat16: it keeps the bits as integers, and would multiply those."""
    return IS_INTERPRETED and str(dtype) == "torch.bfloat16"


def tile_slots(block_size: int, head_dim: int, itemsize: int) -> int:
    """How many slots make a tile: the whole block, or as many as fit into TILE_BYTES. At least 16."""
    return min(block_size, TILE_BYTES // (triton.next_power_of_2(head_dim) * itemsize))
