"""Paged attention from torch's own parts: gather each sequence's scattered KV, then call the fused attention.

    block table of row 7:  (9, 2, 5)      pool: ..[ block 2 ]..[ block 5 ]..[ block 9 ]..
                                                       │            │            │
    buffer:                [ block 9 | block 2 | block 5 ]  ◀────── index_select ┘

Rows that feed one token (decodes) run together: sorted by context length and cut into groups of similar length, each
padded to its longest. Rows that feed more (prefill chunks) run one at a time. Two costs decide the speed on a CPU, and
shape this file: reading padding (hence the groups), and fresh large temporaries, whose every page the operating system
must first hand out and clear (hence the buffers, kept from layer to layer and step to step).

A padded place must not bring a NaN along, and 0 × NaN is NaN: its index points at the row's own last token, a slot that
is filled, and the mask takes it out of the softmax.

Letters: T tokens, N rows of a group, L the longest context in it, H heads, K KV heads, G = H / K, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from minipaged.model.attention.backend import AttentionBackend
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer

# A group of several rows may gather this many slots: they should still be in the CPU's cache when they are read. Only
# speed depends on it.
MAX_GROUP_SLOTS = 2048

Pools = tuple[torch.Tensor, torch.Tensor]  # one layer's keys and values by slots, [num_slots, K, D] each


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """N rows that feed one token each."""

    slots: torch.Tensor  # [N * L] where their keys and values are
    mask: torch.Tensor  # [N, 1, 1, L] to be added to the scores: 0 for a token of the context, −inf for padding


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row that feeds Q > 1 tokens."""

    tokens: slice  # Q of the T tokens
    slots: torch.Tensor  # [L]
    mask: torch.Tensor | None  # [Q, L] 0 where a query may look, else −inf; None: no history, plain causal attention


@dataclass(frozen=True, slots=True)
class GatherMetadata:
    """A step's rows, sorted into the two kinds."""

    decodes: tuple[DecodeGroup, ...]
    decode_tokens: torch.Tensor  # [sum of N] the places among the T tokens, one group after another
    prefills: tuple[PrefillRow, ...]


class GatherAttention(AttentionBackend):
    """Gather into reused buffers, then `scaled_dot_product_attention`. The buffers make it one model's own."""

    name = "gather"

    def __init__(self) -> None:
        self._buffers = (torch.empty(0), torch.empty(0))  # for keys and values

    def prepare(self, batch: RaggedBatch, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> GatherMetadata:
        """Build every index and mask of the step."""
        decode_rows = [row for row, length in enumerate(batch.query_lens) if length == 1]
        groups = group_by_length(decode_rows, batch.context_lens)
        first_tokens = [0, *accumulate(batch.query_lens)]  # where each row begins among the T tokens
        return GatherMetadata(
            decodes=tuple(_decode_group(group, batch, dtype) for group in groups),
            decode_tokens=torch.tensor(
                [first_tokens[row] for group in groups for row in group], device=batch.block_tables.device
            ),
            prefills=tuple(
                _prefill_row(row, first_tokens[row], batch, dtype)
                for row, length in enumerate(batch.query_lens)
                if length > 1
            ),
        )

    def forward(self, query: torch.Tensor, layer: KVLayer, metadata: GatherMetadata) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        pools = layer.key.flatten(0, 1), layer.value.flatten(0, 1)
        output = torch.empty_like(query)  # [T, H, D]
        if metadata.decodes:
            output[metadata.decode_tokens] = self._decode(query[metadata.decode_tokens], pools, metadata.decodes)
        for row in metadata.prefills:
            output[row.tokens] = self._prefill(query[row.tokens], pools, row)
        return output

    def _decode(self, query: torch.Tensor, pools: Pools, groups: tuple[DecodeGroup, ...]) -> torch.Tensor:
        """One token a row, the rows of one group after another's: `[sum of N, H, D]` to `[sum of N, H, D]`."""
        # The G query heads of a KV head see the same keys, so they may stand as G queries of one head: each key is then
        # read once, not G times.
        queries = query.unflatten(1, (pools[0].shape[1], -1)).split([group.mask.shape[0] for group in groups])
        attended = []
        for q, group in zip(queries, groups, strict=True):  # q [N, K, G, D]
            key, value = self._gather(pools, group.slots, q.shape[0])  # [N, K, L, D] each
            attended.append(F.scaled_dot_product_attention(q, key, value, attn_mask=group.mask))
        return torch.cat(attended).flatten(1, 2)

    def _prefill(self, query: torch.Tensor, pools: Pools, row: PrefillRow) -> torch.Tensor:
        """A chunk of one row: `[Q, H, D]` to `[Q, H, D]`."""
        key, value = self._gather(pools, row.slots, 1)  # [1, K, L, D] each
        q = query.transpose(0, 1)[None]  # [1, H, Q, D]
        attended = F.scaled_dot_product_attention(
            q, key, value, attn_mask=row.mask, is_causal=row.mask is None, enable_gqa=True
        )
        return attended[0].transpose(0, 1)

    def _gather(self, pools: Pools, slots: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
        """The keys and values at `slots` `[N * L]` as two `[N, K, L, D]`, valid until the next call."""
        num_slots = slots.shape[0]
        if self._buffers[0].shape[0] < num_slots:
            room = 1 << (num_slots - 1).bit_length()  # a context grows by a slot a step; the buffers do not
            self._buffers = tuple(pool.new_empty(room, *pool.shape[1:]) for pool in pools)
        gathered = []
        for pool, buffer in zip(pools, self._buffers, strict=True):
            found = torch.index_select(pool, 0, slots, out=buffer[:num_slots])  # [N * L, K, D]
            gathered.append(found.view(num_rows, -1, *pool.shape[1:]).transpose(1, 2))
        return gathered


def group_by_length(rows: Sequence[int], context_lens: Sequence[int]) -> list[list[int]]:
    """Cut rows into groups of similar context length, longest first.

    A row joins while it is at least three quarters as long as the group's longest (or within 32 tokens of it: short
    rows cost less as padding than as a call of their own), and while the group gathers at most `MAX_GROUP_SLOTS`.
    """
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda row: -context_lens[row]):
        padding = longest - context_lens[row]
        fits = groups and padding <= max(longest // 4, 32) and (len(groups[-1]) + 1) * longest <= MAX_GROUP_SLOTS
        if fits:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = context_lens[row]
    return groups


def _decode_group(rows: list[int], batch: RaggedBatch, dtype: torch.dtype) -> DecodeGroup:
    device = batch.block_tables.device
    lens = torch.tensor([batch.context_lens[row] for row in rows], device=device)[:, None]  # [N, 1]
    places = torch.arange(batch.context_lens[rows[0]], device=device)  # [L]
    positions = torch.minimum(places, lens - 1)  # [N, L] padding repeats the row's last token
    return DecodeGroup(
        slots=slots_of(batch.block_tables[rows], positions, batch.block_size).flatten(),
        mask=_additive(places < lens, dtype)[:, None, None],
    )


def _prefill_row(row: int, first_token: int, batch: RaggedBatch, dtype: torch.dtype) -> PrefillRow:
    device = batch.block_tables.device
    query_len, context_len = batch.query_lens[row], batch.context_lens[row]
    places = torch.arange(context_len, device=device)[None]  # [1, L]
    # is_causal lets query i see keys 0…i. A chunk with history starts at a later position, so it needs a real mask.
    has_history = query_len < context_len
    mask = _additive(places <= places[0, -query_len:, None], dtype) if has_history else None
    return PrefillRow(
        tokens=slice(first_token, first_token + query_len),
        slots=slots_of(batch.block_tables[row : row + 1], places, batch.block_size).flatten(),
        mask=mask,
    )


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What to add to the scores: 0 where the mask is True, −inf elsewhere. The fused attention turns a mask of truth
    values into this one anew, in every layer.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def slots_of(tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where the tokens at `positions` `[N, L]` are in the flattened pool, by their rows' block tables `[N, W]`."""
    return tables.gather(1, positions // block_size) * block_size + positions % block_size  # [N, L]
