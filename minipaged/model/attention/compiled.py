"""Paged attention that torch.compile fuses: keys and values are read where they lie, without a padded copy.

A decode reads each key once, so copying it first, as `gather` does, is most of the work. Here everything that one head
of one decode row attends to is a bag, a bag is cut into tiles of 32 tokens, and all tiles of all bags stand side by
side, as a step's tokens do. With two heads:

    row 0, context 70, head 0    [ 0 … 31 | 32 … 63 | 64 … 69 ]    bag 0, tiles 0, 1, 2    filled 32, 32, 6
                       head 1    [ 0 … 31 | 32 … 63 | 64 … 69 ]    bag 1, tiles 3, 4, 5    filled 32, 32, 6
    row 1, context 9,  head 0    [ 0 …  8 ]                        bag 2, tile  6          filled 9
                       head 1    [ 0 …  8 ]                        bag 3, tile  7          filled 9
                                                                        + tile  8          filled 0

Scores are computed tile by tile, and two small results, the largest and the sum, are reduced bag by bag. What is
written as `key[places]` below is a gather in eager mode. Compiled, it is an address inside the loop that multiplies and
sums. For the weighted sum of the values torch has such a loop already, under a name from another trade: an embedding
bag adds up vectors of a table at given places, each times a weight, and reads them where they lie.

A tile is no block: places are found through the block table, so the same graph serves every block size. Tiles, bags,
rows and tokens are only lengths of the graph's inputs (marked unbacked: also 0 and 1 are nothing special), so one graph
serves every batch.

One layer of the default model, 64 decodes with 203 tokens of context each on average, on two cores with AVX-512,
`gather` → here: 2.4 → 1.5 ms in float32, 1.8 → 1.4 ms in bfloat16 (`python -m minipaged.bench attention`).

Letters: T tokens, N decode rows, B bags (N * H), P tiles, E tiles if there were one head, S places of a tile, W tiles
of the longest bag, H heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from minipaged.errors import InvalidParameter
from minipaged.model.attention.backend import AttentionBackend
from minipaged.model.attention.gather import slots_of
from minipaged.model.attention.prefill import PrefillRows
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer

# Indices come from block tables, not from users: testing each of them again inside the loops would double the time.
COMPILE_OPTIONS = {"assert_indirect_indexing": False}

MAX_GRAPHS = 256  # torch's bound for one function in a process; left to itself it stops at 8

TILE = 32  # only speed depends on it. Fewer: more tiles to reduce over; more: more padding in each bag's last tile


@dataclass(frozen=True, slots=True)
class Tiles:
    """The bags of the decode rows, cut into tiles. The last tile is empty: it fills up `of_bag`. Where it lies, it ends
    the last bag, and its weights there are 0.
    """

    tokens: torch.Tensor  # [N] the decode rows' places among the T tokens
    bag: torch.Tensor  # [P] which of the B bags a tile belongs to
    places: torch.Tensor  # [P, S] its keys and values among the pool's num_slots * K; padding repeats the row's last
    filled: torch.Tensor  # [P] how many of its places count
    of_bag: torch.Tensor  # [W, B] the tiles of each bag; after its last one, the empty tile
    begin: torch.Tensor  # [B] where each bag begins in `places`, flattened

    @classmethod
    def of(cls, batch: RaggedBatch, num_heads: int, num_kv_heads: int) -> Tiles:
        """A step without decodes gets a stand-in, since no length may be 0: its first token, seeing itself alone."""
        device = batch.block_tables.device
        decodes = [row for row, length in enumerate(batch.query_lens) if length == 1]
        first_tokens = list(accumulate(batch.query_lens, initial=0))
        tables = batch.block_tables[decodes or [0]]  # [N, …]
        context = torch.tensor([batch.context_lens[row] for row in decodes] or [1], device=device)  # [N]

        # What all heads of a row share is worked out once, for E tiles.
        num_tiles = -(-context // TILE)  # [N]
        row, number, first_of_row = _side_by_side(num_tiles)  # [E], [E], [N]
        begin = number * TILE  # [E] in the row's context
        positions = begin[:, None] + torch.arange(TILE, device=device)  # [E, S]
        slots = slots_of(tables[row], positions.minimum(context[row][:, None] - 1), batch.block_size)  # [E, S]
        filled = (context[row] - begin).clamp(max=TILE)  # [E]

        counts = num_tiles.repeat_interleave(num_heads)  # [B]
        bag, number, first = _side_by_side(counts)  # [P - 1], [P - 1], [B]
        shared = first_of_row[bag // num_heads] + number  # [P - 1] which of the E
        bag, shared = (torch.cat((x, x[-1:])) for x in (bag, shared))  # [P] each; the empty tile is the last bag's too
        filled = filled[shared]  # [P]
        filled[-1] = 0
        kv_head = bag % num_heads // (num_heads // num_kv_heads)  # [P]
        logical = torch.arange(int(num_tiles.max()), device=device)[:, None]  # [W, 1]
        return cls(
            tokens=torch.tensor([first_tokens[row] for row in decodes] or [0], device=device),
            bag=bag,
            places=(slots * num_kv_heads)[shared].add_(kv_head[:, None]),
            filled=filled,
            of_bag=torch.where(logical < counts, first + logical, len(bag) - 1),
            begin=first * TILE,
        )


def _side_by_side(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay `counts[i]` things of each of N owners in a line: each thing's owner, its number among the owner's own, and
    where each owner's first one is. counts [N] -> [sum], [sum], [N].
    """
    first = counts.cumsum(0) - counts
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return owner, torch.arange(len(owner), device=counts.device) - first[owner], first


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
            allowed = "needs a C++ compiler, such as g++ (and so does enforce_eager=False, which runs on it)"
            raise InvalidParameter("attention_backend", self.name, allowed) from error
        # One graph for each dtype and number of heads, whichever model has them: many models, many graphs.
        self._attend = torch.compile(
            attend, dynamic=False, fullgraph=True, recompile_limit=MAX_GRAPHS, options=COMPILE_OPTIONS
        )

    def prepare(self, batch: RaggedBatch, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> CompiledMetadata:
        """Cut the contexts into tiles, once for each head."""
        metadata = CompiledMetadata(Tiles.of(batch, num_heads, num_kv_heads), PrefillRows.of(batch))
        tiles, prefills = metadata.tiles, metadata.prefills
        for tensor, *lengths in (
            (tiles.tokens, "N"),
            (tiles.bag, "P"),
            (tiles.places, "P"),
            (tiles.filled, "P"),
            (tiles.of_bag, "W", "B"),
            (tiles.begin, "B"),
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
    torch.ops.minipaged.attend_prefills(output, query, key, value, prefills.spans, prefills.slots)
    return output


def attend_tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Decode attention: query [N, H, D]; key and value [num_slots, K, D] -> [N, H, D].

    Scores are a plain multiplication and sum, not a matrix product, which would want its operands copied together.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q = _stored(query.flatten(0, 1).to(wide) * query.shape[-1] ** -0.5)  # [B, D]
    key, value = key.flatten(0, 1), value.flatten(0, 1)  # [num_slots * K, D]

    scores = (q[tiles.bag][:, None] * key[tiles.places].to(wide)).sum(-1)  # [P, S]
    is_padding = torch.arange(TILE, device=query.device) >= tiles.filled[:, None]  # [P, S]
    scores = _stored(scores.masked_fill(is_padding, float("-inf")))
    largest = scores.amax(1)[tiles.of_bag].amax(0)  # [W, B] -> [B]
    weights = (scores - largest[tiles.bag][:, None]).exp()  # [P, S], 0 for padding
    # The empty tile adds nothing to any bag, even if the last row's scores are NaN, and so are this tile's weights.
    added = weights.sum(1).masked_fill(tiles.filled == 0, 0.0)  # [P]
    total = added[tiles.of_bag].sum(0)  # [W, B] -> [B]
    weights = (weights / total[tiles.bag][:, None]).to(value.dtype)  # [P, S]
    places, weights = tiles.places.flatten(), weights.flatten()  # [P * S] each
    summed = F.embedding_bag(places, value, tiles.begin, mode="sum", per_sample_weights=weights)  # [B, D]
    return summed.view_as(query)


def _stored(x: torch.Tensor) -> torch.Tensor:
    """A no-op at which the compiler writes `x` to memory once. Else each loop that reads `x` computes it anew.

    For the query in bfloat16, needed in the innermost loop, that took 8 % of the attention; for masked scores, 6 %.
    """
    return x.as_strided(x.shape, x.stride())
