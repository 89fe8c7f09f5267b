"""Paged attention as the paper writes it: block by block (section 4.1, equation 4).

For a query q_i the context is read one KV block at a time. With K_j and V_j the keys and values of block j:

    A_ij = exp(q_i · K_j / sqrt(D)) / sum over all blocks of the same        the weights of block j's tokens
    o_i  = sum over j of  A_ij · V_j

The denominator is known only after the last block. A running softmax gets by without a second pass: it keeps the
largest score so far, and when a block brings a larger one, it shrinks what it has summed by exp(old - new). Scores
relative to the largest can never overflow.

This is the explanation, and the oracle that the other backends are tested against. It is slow.

Letters: Q query tokens of one row, B slots of one block that hold context, H heads, K KV heads, G = H / K, D head_dim.
"""

from __future__ import annotations

import torch

from minipaged.model.attention.backend import AttentionBackend
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer


class ReferenceAttention(AttentionBackend):
    """One sequence after another, one block after another, in float32 at least."""

    name = "reference"

    def prepare(self, batch: RaggedBatch, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> RaggedBatch:
        """Nothing is worth preparing here: the batch says it all."""
        return batch

    def forward(self, query: torch.Tensor, layer: KVLayer, metadata: RaggedBatch) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        rows = query.split(metadata.query_lens)  # each [Q, H, D]
        attended = [
            paged_attention(row_query, layer, block_table.tolist(), context_len)
            for row_query, block_table, context_len in zip(
                rows, metadata.block_tables, metadata.context_lens, strict=True
            )
        ]
        return torch.cat(attended).to(query.dtype)


def paged_attention(query: torch.Tensor, layer: KVLayer, block_table: list[int], context_len: int) -> torch.Tensor:
    """Attention of one sequence's last Q tokens over its `context_len` tokens.

    Takes the query `[Q, H, D]` and returns `[Q, H, D]` in float32 at least. `block_table` names the physical block of
    each logical one; entries beyond the context are not read.
    """
    num_queries, num_heads, head_dim = query.shape
    block_size, num_kv_heads = layer.key.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    # Query heads g*G … g*G+G-1 share KV head g.
    q = query.to(wide).unflatten(1, (num_kv_heads, -1)) * head_dim**-0.5  # [Q, K, G, D]
    query_positions = torch.arange(context_len - num_queries, context_len, device=query.device)  # [Q]

    largest = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=query.device)  # [Q, K, G]
    denominator = torch.zeros_like(largest)  # [Q, K, G] sum of exp(score - largest)
    numerator = torch.zeros_like(q)  # [Q, K, G, D] sum of exp(score - largest) * value

    for logical, first in enumerate(range(0, context_len, block_size)):
        physical = block_table[logical]
        num_filled = min(block_size, context_len - first)  # the slots after these may hold anything: not read
        key = layer.key[physical, :num_filled].to(wide)  # [B, K, D]
        value = layer.value[physical, :num_filled].to(wide)  # [B, K, D]

        scores = torch.einsum("qkgd,bkd->qkgb", q, key)
        key_positions = torch.arange(first, first + num_filled, device=query.device)  # [B]
        is_future = key_positions > query_positions[:, None]  # [Q, B]
        scores = scores.masked_fill(is_future[:, None, None, :], float("-inf"))

        # Block 0 holds position 0, which every query may see: `largest` is finite from the first block on.
        new_largest = torch.maximum(largest, scores.amax(dim=-1))  # [Q, K, G]
        shrink = torch.exp(largest - new_largest)  # [Q, K, G]
        weights = torch.exp(scores - new_largest[..., None])  # [Q, K, G, B]
        denominator = denominator * shrink + weights.sum(dim=-1)
        numerator = numerator * shrink[..., None] + torch.einsum("qkgb,bkd->qkgd", weights, value)
        largest = new_largest

    return (numerator / denominator[..., None]).view(num_queries, num_heads, head_dim)
