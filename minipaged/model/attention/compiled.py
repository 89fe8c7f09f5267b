"""Paged attention that torch.compile fuses: keys and values are read where they lie, without a padded copy.

A decode reads each key once, so copying it first, as `gather` does, is most of the work. Here the context of every
decode row is cut into tiles of 32 tokens, and all tiles of all rows stand side by side, as a step's tokens do:

    row 0, context 70    [ 0 … 31 | 32 … 63 | 64 … 69 ]      tiles 0, 1, 2     filled 32, 32, 6
    row 1, context 9     [ 0 …  8 ]                          tile  3           filled 9
                                                             tile  4           filled 0: stands where a row has no more

Everything that grows with the context is computed per tile; only three small results are reduced per row. What is
written as `pool[slots]` below is a gather in eager mode. Compiled, it is an address inside the loop that multiplies and
sums. A long row is many tiles, so one sequence alone still keeps all cores busy (what others call flash-decoding).

A tile is no block: slots are found through the block table, so the same graph serves every block size. Tiles, rows and
tokens are only lengths of the graph's inputs (marked unbacked: also 0 and 1 are nothing special), so one graph serves
every batch.

One layer, 64 decodes with 212 tokens of context each on average and 700 at most, 9 heads over 3 KV heads of 64, on two
cores with AVX-512, `gather` → here: 4.6 → 2.8 ms of each core's time in float32, 4.3 → 2.3 ms in bfloat16.

Letters: T tokens, N decode rows, P tiles, S slots of a tile, W tiles of the longest row, H heads, K KV heads,
G = H / K, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from minipaged.errors import InvalidParameter
from minipaged.model.attention.backend import AttentionBackend
from minipaged.model.attention.gather import slots_of
from minipaged.model.attention.prefill import PrefillRows, attend_prefills
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer

# Indices come from block tables, not from users: testing each of them again inside the loops would double the time.
COMPILE_OPTIONS = {"assert_indirect_indexing": False}

TILE = 32  # fewer slots: more partial outputs to add up; more: more padding in each row's last tile


@dataclass(frozen=True, slots=True)
class Tiles:
    """The contexts of the decode rows, cut into tiles. The last tile is empty."""

    tokens: torch.Tensor  # [N] the decode rows' places among the T tokens
    row: torch.Tensor  # [P] which of the N rows a tile belongs to
    slots: torch.Tensor  # [P, S] where its keys and values are; padding repeats the row's last token
    filled: torch.Tensor  # [P] how many of its slots count
    of_row: torch.Tensor  # [W, N] the tiles of each row; after its last one, the empty tile

    @classmethod
    def of(cls, batch: RaggedBatch) -> Tiles:
        """A step without decodes gets a stand-in, since no length may be 0: its first token, seeing itself alone."""
        device = batch.block_tables.device
        decodes = [row for row, length in enumerate(batch.query_lens) if length == 1]
        first_tokens = list(accumulate(batch.query_lens, initial=0))
        tables = batch.block_tables[decodes or [0]]  # [N, …]
        context = torch.tensor([batch.context_lens[row] for row in decodes] or [1], device=device)  # [N]

        num_tiles = -(-context // TILE)  # [N]
        end = num_tiles.cumsum(0)  # [N]
        row = torch.arange(len(context), device=device).repeat_interleave(num_tiles)  # [P - 1]
        row = torch.cat((row, row[:1]))  # [P] the empty tile is row 0's by name
        begin = (torch.arange(len(row), device=device) - (end - num_tiles)[row]) * TILE  # [P] in the row's context
        begin[-1] = context[0]
        positions = begin[:, None] + torch.arange(TILE, device=device)  # [P, S]
        last = context[row][:, None] - 1
        logical = torch.arange(int(num_tiles.max()), device=device)[:, None]  # [W, 1]
        return cls(
            tokens=torch.tensor([first_tokens[row] for row in decodes] or [0], device=device),
            row=row,
            slots=slots_of(tables[row], positions.minimum(last), batch.block_size),
            filled=(context[row] - begin).clamp(max=TILE),
            of_row=torch.where(logical < num_tiles, end - num_tiles + logical, len(row) - 1),
        )


@dataclass(frozen=True, slots=True)
class CompiledMetadata:
    tiles: Tiles
    prefills: PrefillRows


class CompiledAttention(AttentionBackend):
    """Decode rows by tiles, in one fused graph; prefill rows by `attend_prefills`."""

    name = "compiled"

    def __init__(self) -> None:
        try:
            get_cpp_compiler()
        except (InvalidCxxCompiler, OSError) as error:  # the latter: CXX names no program
            raise InvalidParameter("attention_backend", self.name, "needs a C++ compiler, such as g++") from error
        self._attend = torch.compile(attend, dynamic=False, fullgraph=True, options=COMPILE_OPTIONS)

    def prepare(self, batch: RaggedBatch) -> CompiledMetadata:
        """Cut the contexts into tiles."""
        metadata = CompiledMetadata(Tiles.of(batch), PrefillRows.of(batch))
        tiles, prefills = metadata.tiles, metadata.prefills
        for tensor, *lengths in (
            (tiles.tokens, "N"),
            (tiles.row, "P"),
            (tiles.slots, "P"),
            (tiles.filled, "P"),
            (tiles.of_row, "W", "N"),
            (prefills.spans, "R"),
            (prefills.slots, "sum of L"),
        ):
            for dim, length in enumerate(lengths):
                mark_unbacked(tensor, dim, shape_id=length)
        return metadata

    def forward(self, query: torch.Tensor, layer: KVLayer, metadata: CompiledMetadata) -> torch.Tensor:
        """See `AttentionBackend.forward`. Inside a compiled layer it becomes a part of the layer's own graph."""
        key, value = layer.key.flatten(0, 1), layer.value.flatten(0, 1)  # [num_slots, K, D]
        if torch.compiler.is_compiling():
            return attend(query, key, value, metadata)
        for tensor in (query, key, value):
            mark_unbacked(tensor, 0)
        return self._attend(query, key, value, metadata)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: CompiledMetadata) -> torch.Tensor:
    """query [T, H, D]; key and value by slots, [num_slots, K, D] -> [T, H, D]."""
    tiles, prefills = metadata.tiles, metadata.prefills
    decoded = attend_tiles(query[tiles.tokens], key, value, tiles)  # [N, H, D]
    output = torch.empty_like(query).index_copy(0, tiles.tokens, decoded)  # [T, H, D]
    attend_prefills(output, query, key, value, prefills.spans, prefills.slots)
    return output


def attend_tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Decode attention: query [N, H, D]; key and value [num_slots, K, D] -> [N, H, D].

    Plain multiplications and sums rather than matrix products, which would want their operands copied together first.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    num_kv_heads, head_dim = key.shape[1:]
    q = query.to(wide).unflatten(1, (num_kv_heads, -1)) * head_dim**-0.5  # [N, K, G, D]

    scores = (q[tiles.row][:, None] * key[tiles.slots].to(wide).unsqueeze(3)).sum(-1)  # [P, S, K, G]
    is_padding = torch.arange(TILE, device=query.device) >= tiles.filled[:, None]  # [P, S]
    scores = scores.masked_fill(is_padding[:, :, None, None], float("-inf"))
    largest = scores[tiles.of_row].amax((0, 2))  # [W, N, S, K, G] -> [N, K, G]
    weights = (scores - largest[tiles.row][:, None]).exp()  # [P, S, K, G], 0 for padding
    partial = (weights[..., None] * value[tiles.slots].to(wide).unsqueeze(3)).sum(1)  # [P, K, G, D]

    numerator = partial[tiles.of_row].sum(0)  # [W, N, K, G, D] -> [N, K, G, D]
    denominator = weights[tiles.of_row].sum((0, 2))  # [N, K, G]
    return (numerator / denominator[..., None]).flatten(1, 2).to(query.dtype)
