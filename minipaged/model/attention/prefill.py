"""Rows that feed several tokens, as one operation that a compiler need not look into.

Each key of a prefill chunk is read by all of its queries, so one gathered copy of the row's context costs next to
nothing beside the products, which torch's fused attention does well. What matters here is that the number of such rows,
and their lengths, are only numbers inside two tensors: one compiled graph with this operation in it serves every step.

Letters: T tokens, R prefill rows, Q tokens that one of them feeds, L its context, H heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from minipaged.model.attention.gather import slots_of
from minipaged.model.batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The R rows of a batch that feed more than one token."""

    spans: torch.Tensor  # [R, 3] on the CPU: the place of the row's first token among the T, then Q and L
    slots: torch.Tensor  # [sum of L] where the contexts' keys and values are, one row after another

    @classmethod
    def of(cls, batch: RaggedBatch) -> PrefillRows:
        """Once a step, for all layers. Decode rows (one token) are left out: they are attended to by tiles."""
        first_tokens = accumulate(batch.query_lens, initial=0)
        device = batch.block_tables.device
        spans, slots = [], [torch.zeros(0, dtype=torch.int64, device=device)]
        for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            first_token = next(first_tokens)
            if query_len > 1:
                spans.append((first_token, query_len, context_len))
                places = torch.arange(context_len, device=device)[None]
                slots.append(slots_of(batch.block_tables[row : row + 1], places, batch.block_size)[0])
        return cls(torch.tensor(spans, dtype=torch.int64, device="cpu").reshape(-1, 3), torch.cat(slots))


# Not `torch.library.custom_op`, which takes 17 µs more of each call, and so of each layer.
_library = torch.library.Library("minipaged", "FRAGMENT")
_library.define(
    "attend_prefills(Tensor(a!) output, Tensor query, Tensor key, Tensor value, Tensor spans, Tensor slots) -> ()"
)


@torch.library.impl(_library, "attend_prefills", "CompositeExplicitAutograd")
def attend_prefills(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Fill the prefill rows' places of `output` `[T, H, D]`; leave the others alone.

    query [T, H, D]; key and value are one layer's pool by slots, `[num_slots, K, D]`; the rest is `PrefillRows`. It is
    called as `torch.ops.minipaged.attend_prefills`: called by this name, a compiler would look into it.
    """
    end = 0
    for first_token, query_len, context_len in spans.tolist():
        row_slots, end = slots[end : end + context_len], end + context_len
        tokens = slice(first_token, first_token + query_len)
        k, v = (pool.index_select(0, row_slots).transpose(0, 1)[None] for pool in (key, value))  # [1, K, L, D]
        # is_causal lets query i see keys 0…i. A chunk with history starts at a later position, so it needs a real mask.
        num_before = context_len - query_len
        mask = k.new_ones(query_len, context_len, dtype=torch.bool).tril(num_before) if num_before else None  # [Q, L]
        attended = F.scaled_dot_product_attention(
            query[tokens].transpose(0, 1)[None],  # [1, H, Q, D]
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        output[tokens] = attended[0].transpose(0, 1)


@torch.library.register_fake("minipaged::attend_prefills", lib=_library)
def _nothing(*_: torch.Tensor) -> None:
    """What is filled is there already; nothing is returned."""
