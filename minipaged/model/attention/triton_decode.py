"""Paged decode attention in Triton: one query a row, its context cut into parts (others call this flash-decoding).

A row of 10,000 tokens on one program would keep a hundred idle ones waiting. So a context is cut every 256 positions,
each part is a program's work, and a second kernel puts the parts together. The parts of all rows stand side by side:

    row 0, context 600    [ 0 … 255 | 256 … 511 | 512 … 599 ]      parts 0, 1, 2 ─▶ merged
    row 1, context  40    [ 0 …  39 ]                              part  3       ─▶ is the answer already

Part j of a row has the numerator n_j, the denominator d_j, and the largest score m_j to which both are relative.
Brought to one common largest score m, they simply add up:

    output = Σ n_j exp(m_j - m)  /  Σ d_j exp(m_j - m)

The cuts lie at positions, and not where the batch would have liked them: a row gives the same bits in any company.

One program serves all G query heads of a KV head, so each key and value is read once and not G times; G is padded to
16, for the matrix units take no less. The padding costs nothing that counts: a decode waits for memory.
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

PART = 256  # positions; what a part hands on is then 1 or 2 % of what it reads
MERGED_AT_ONCE = 16  # parts


def num_parts(context_len: int) -> int:
    return -(-context_len // PART)


def queries_of_a_program(group: int) -> int:
    return max(16, triton.next_power_of_2(group))


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """The decode rows' contexts, cut into P parts."""

    parts: torch.Tensor  # [P, 4] token, start of the row's table among all tables, first position, context length
    merges: torch.Tensor  # [rows of several parts, 3] token, first part, number of parts

    @classmethod
    def of(cls, batch: RaggedBatch) -> DecodeParts:
        """Laid out on the CPU, since the lengths are known there, and sent over in two pieces."""
        device, width = batch.block_tables.device, batch.block_tables.shape[1]
        first_tokens = list(accumulate(batch.query_lens, initial=0))
        rows = [row for row, length in enumerate(batch.query_lens) if length == 1]
        tokens = torch.tensor([first_tokens[row] for row in rows], dtype=torch.int64)  # [N]
        contexts = torch.tensor([batch.context_lens[row] for row in rows], dtype=torch.int64)  # [N]
        counts = torch.tensor([num_parts(batch.context_lens[row]) for row in rows], dtype=torch.int64)  # [N]
        starts = counts.cumsum(0) - counts  # [N] each row's first part

        of = torch.arange(len(rows)).repeat_interleave(counts)  # [P] whose part it is
        begins = (torch.arange(len(of)) - starts[of]) * PART
        tables = torch.tensor(rows, dtype=torch.int64) * width  # [N]
        parts = torch.stack((tokens[of], tables[of], begins, contexts[of]), dim=1)
        merges = torch.stack((tokens, starts, counts), dim=1)[counts > 1]
        return cls(parts.to(device), merges.to(device))


def decode(
    output: torch.Tensor, query: torch.Tensor, layer: KVLayer, block_tables: torch.Tensor, work: DecodeParts
) -> None:
    """Fill the decode rows' places of `output` `[T, H, D]`; query `[T, H, D]`. Leaves the others alone."""
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = layer.key.shape[1:3]
    group = num_heads // num_kv_heads
    wide = {"dtype": torch.float32, "device": query.device}
    numerators = torch.empty((len(work.parts), num_heads, head_dim), **wide)
    largests = torch.empty((len(work.parts), num_heads), **wide)
    denominators = torch.empty_like(largests)
    padded_dim = triton.next_power_of_2(head_dim)
    attend_parts[(len(work.parts), num_kv_heads)](
        output,
        numerators,
        largests,
        denominators,
        query,
        *layer,
        block_tables,
        work.parts,
        head_dim**-0.5,
        PART=PART,
        GROUP=group,
        NUM_QUERIES=queries_of_a_program(group),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        TILE=tile_slots(block_size, head_dim, query.itemsize),
        WIDEN=widens(query.dtype),
        num_stages=2,
    )
    if len(work.merges):
        merge_parts[(len(work.merges), num_heads)](
            output,
            numerators,
            largests,
            denominators,
            work.merges,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            AT_ONCE=MERGED_AT_ONCE,
        )


@triton.jit
def attend_parts(
    output,  # [T, H, D]
    numerators,  # [P, H, D]
    largests,  # [P, H]
    denominators,  # [P, H]
    query,  # [T, H, D]
    key_pool,
    value_pool,
    tables,
    parts,  # [P, 4]
    scale,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (part, KV head)."""
    part, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(parts + part * 4)
    table = tl.load(parts + part * 4 + 1)
    begin = tl.load(parts + part * 4 + 2)
    context_len = tl.load(parts + part * 4 + 3)

    members = tl.arange(0, NUM_QUERIES)  # [M] the heads of this KV head, and padding
    heads = kv_head * GROUP + members  # [M]
    dims = tl.arange(0, PADDED_DIM)
    is_real = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]  # [M, D]
    of_token = (token * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    numerator, largest, denominator = attend(
        tl.load(query + of_token, mask=is_real, other=0.0),
        context_len - 1 + tl.zeros_like(heads),
        begin,
        tl.minimum(begin + PART, context_len),
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
    if context_len <= PART:
        tl.store(output + of_token, numerator / denominator[:, None], mask=is_real)
    else:
        of_part = part * NUM_KV_HEADS * GROUP + heads  # [M]
        tl.store(numerators + of_part[:, None] * HEAD_DIM + dims[None, :], numerator, mask=is_real)
        tl.store(largests + of_part, largest, mask=members < GROUP)
        tl.store(denominators + of_part, denominator, mask=members < GROUP)


@triton.jit
def merge_parts(
    output,  # [T, H, D]
    numerators,  # [P, H, D]
    largests,  # [P, H]
    denominators,  # [P, H]
    merges,  # [rows of several parts, 3]
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program (row of several parts, head): the same running softmax, over parts in place of keys."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(merges + row * 3)
    begin = tl.load(merges + row * 3 + 1)
    end = begin + tl.load(merges + row * 3 + 2)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM

    largest = tl.full((1,), float("-inf"), tl.float32)
    denominator = tl.zeros((1,), tl.float32)
    numerator = tl.zeros((PADDED_DIM,), tl.float32)
    for first in range(begin, end, AT_ONCE):
        parts = first + tl.arange(0, AT_ONCE)  # [parts]
        is_part = parts < end
        at = parts * NUM_HEADS + head
        part_largest = tl.load(largests + at, mask=is_part, other=float("-inf"))
        part_denominator = tl.load(denominators + at, mask=is_part, other=0.0)
        is_filled = is_part[:, None] & is_dim[None, :]
        part_numerator = tl.load(numerators + at[:, None] * HEAD_DIM + dims[None, :], mask=is_filled, other=0.0)

        new_largest = tl.maximum(largest, tl.max(part_largest, axis=0))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(part_largest - new_largest)  # [parts]
        denominator = denominator * shrink + tl.sum(weights * part_denominator, axis=0)
        numerator = numerator * shrink + tl.sum(weights[:, None] * part_numerator, axis=0)
        largest = new_largest

    tl.store(output + (token * NUM_HEADS + head) * HEAD_DIM + dims, numerator / denominator, mask=is_dim)
