"""Paged prefill attention in Triton: the chunk of every prefill row, each against its own context, in one launch.

A program takes a tile of queries and walks along the context, from position 0 to the last one that its queries may see.
The keys before the chunk, its history, were written by earlier steps; to the walk they are no different.

    context      0 …  … 41 │ 42  43  44  45          a chunk of 4 tokens after 42; each sees all keys up to itself
    query 42     ■ ■ ■ ■ ■ │  ■   ·   ·   ·
    query 43     ■ ■ ■ ■ ■ │  ■   ■   ·   ·
    …

The G query heads of a KV head see the same keys, so they share a tile: its query m is head m % G of token m // G. With
G = 3 a tile of 64 is 21 tokens and a head. This needs no padding of G, and reads each key once for all of them.

Rows are of different lengths, and there are as many programs for each as the longest needs: the others leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from minipaged.model.attention.triton_attend import attend, tile_slots, widens
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer


def queries_of_a_program(head_dim: int) -> int:
    return 64 if head_dim <= 128 else 32  # each has a numerator of that many numbers, and they are kept in registers


@dataclass(frozen=True, slots=True)
class PrefillSpans:
    """The R rows that feed more than one token."""

    spans: torch.Tensor  # [R, 4] first token, start of the row's table among all tables, tokens fed, context length
    longest: int  # the most tokens that one of them feeds; 0 without any

    @classmethod
    def of(cls, batch: RaggedBatch) -> PrefillSpans:
        """Once a step, for all layers; laid out on the CPU, where the lengths are known."""
        width = batch.block_tables.shape[1]
        spans = [
            (first_token, row * width, query_len, context_len)
            for row, (first_token, query_len, context_len) in enumerate(
                zip(accumulate(batch.query_lens, initial=0), batch.query_lens, batch.context_lens, strict=False)
            )
            if query_len > 1
        ]
        longest = max((query_len for _, _, query_len, _ in spans), default=0)
        return cls(torch.tensor(spans, dtype=torch.int64, device=batch.block_tables.device), longest)


def prefill(
    output: torch.Tensor, query: torch.Tensor, layer: KVLayer, block_tables: torch.Tensor, work: PrefillSpans
) -> None:
    """Fill the prefill rows' places of `output` `[T, H, D]`; query `[T, H, D]`. Leaves the others alone."""
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = layer.key.shape[1:3]
    group = num_heads // num_kv_heads
    num_queries = queries_of_a_program(head_dim)
    grid = (triton.cdiv(work.longest * group, num_queries), num_kv_heads, len(work.spans))
    attend_chunks[grid](
        output,
        query,
        *layer,
        block_tables,
        work.spans,
        head_dim**-0.5,
        GROUP=group,
        NUM_QUERIES=num_queries,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TILE=tile_slots(block_size, head_dim, query.itemsize),
        WIDEN=widens(query.dtype),
        num_stages=2,
    )


@triton.jit
def attend_chunks(
    output,  # [T, H, D]
    query,  # [T, H, D]
    key_pool,
    value_pool,
    tables,
    spans,  # [R, 4]
    scale,
    GROUP: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (tile of queries, KV head, row)."""
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(spans + row * 4)
    table = tl.load(spans + row * 4 + 1)
    query_len = tl.load(spans + row * 4 + 2)
    context_len = tl.load(spans + row * 4 + 3)
    if tile * NUM_QUERIES >= query_len * GROUP:
        return

    members = tile * NUM_QUERIES + tl.arange(0, NUM_QUERIES)  # [M] of the row's pairs (token, head of this KV head)
    heads = kv_head * GROUP + members % GROUP  # [M]
    tokens = tl.minimum(members // GROUP, query_len - 1)  # [M] in the chunk; padding repeats the last
    positions = context_len - query_len + tokens  # [M]
    dims = tl.arange(0, PADDED_DIM)
    is_real = (members < query_len * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]  # [M, D]
    at = ((first_token + tokens) * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    numerator, _, denominator = attend(
        tl.load(query + at, mask=is_real, other=0.0),
        positions,
        0,
        tl.max(positions, axis=0) + 1,
        tables + table,
        key_pool,
        value_pool,
        kv_head,
        scale,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
        WIDEN,
    )
    tl.store(output + at, numerator / denominator[:, None], mask=is_real)
