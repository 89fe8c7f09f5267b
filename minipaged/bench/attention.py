"""One layer's decode attention by backend, in the default model's shape: 64 rows of mixed length, then one alone.

Beside the backends stands what paging has to be measured against: each row's keys and values in one piece already, as
systems before it kept them, and as torch's fused attention wants them.
"""

from __future__ import annotations

import random
import statistics
import time

import torch
import torch.nn.functional as F

from minipaged.bench.report import Report
from minipaged.bench.roofs import gbytes_per_second
from minipaged.engine_args import EngineArgs
from minipaged.model.attention import BACKENDS, make_backend
from minipaged.model.attention.gather import slots_of
from minipaged.model.attention.triton_backend import TritonAttention
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer
from minipaged.step import SequenceWork

NUM_ROWS, LONGEST, BLOCK_SIZE = 64, 700, 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
NUM_LAYERS = 8  # used in turn, so that no layer's keys and values are in the cache from the last time
ONE_PIECE = "not paged, in one piece"

Pieces = list[tuple[torch.Tensor, torch.Tensor]]  # each row's keys and values, [1, K, L, D] each


@torch.inference_mode()
def measure(args) -> list[Report]:
    """Every backend that a CPU has, in turn on the same batch; `reference` only a few times, for it is slow."""
    name = EngineArgs(dtype=args.dtype).dtype
    dtype = torch.float32 if name == "auto" else getattr(torch, name)
    return [_report(contexts, dtype, args.repeats) for contexts in (_mixed_lengths(), [LONGEST])]


def _report(contexts: list[int], dtype: torch.dtype, repeats: int) -> Report:
    batch, layers = _scene(contexts, dtype)
    query = torch.randn(len(contexts), NUM_HEADS, HEAD_DIM).to(dtype)
    backends = {name: make_backend(name) for name in BACKENDS if name != TritonAttention.name}
    prepared = {name: backend.prepare(batch, NUM_HEADS, NUM_KV_HEADS, dtype) for name, backend in backends.items()}
    pieces = [in_one_piece(batch, layer) for layer in layers]
    ways = {
        name: lambda layer, name=name: backends[name].forward(query, layers[layer], prepared[name]) for name in backends
    }
    ways[ONE_PIECE] = lambda layer: attend_one_piece(query, pieces[layer])
    timed: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats * NUM_LAYERS + 1):
        for name, attend in ways.items():
            if name == "reference" and repeat > repeats:
                continue
            begin = time.perf_counter()
            attend(repeat % NUM_LAYERS)
            if repeat > 0:  # the first is a warm-up, and compiles
                timed[name].append(1e3 * (time.perf_counter() - begin))

    memory = gbytes_per_second()
    gbytes = 2 * sum(contexts) * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize / 1e9
    report = Report(f"one layer, decodes: {len(contexts)}, mean context {sum(contexts) / len(contexts):.0f}, {dtype}")
    for name, times in timed.items():
        ms = statistics.median(times)
        report.add(backend=name, ms=ms, fastest_ms=min(times), KV_GB_per_s=1e3 * gbytes / ms)
    report.notes.append(f"roof: {memory:.1f} GB/s read, {1e3 * gbytes / memory:.2f} ms")
    report.notes.append("triton is left out: its kernels are for a GPU, and these keys and values are on the CPU")
    return report


def in_one_piece(batch: RaggedBatch, layer: KVLayer) -> Pieces:
    """Copies of what the block tables name."""
    pieces = []
    for table, length in zip(batch.block_tables, batch.context_lens, strict=True):
        [slots] = slots_of(table[None], torch.arange(length)[None], batch.block_size)  # [L]
        pieces.append(tuple(pool.flatten(0, 1)[slots].transpose(0, 1)[None].contiguous() for pool in layer))
    return pieces


def attend_one_piece(query: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Decode attention without blocks, a row at a time: query [N, H, D] -> [N, H, D]."""
    queries = query.unflatten(1, (NUM_KV_HEADS, -1)).split(1)  # each [1, K, G, D]
    attended = [F.scaled_dot_product_attention(q, key, value) for q, (key, value) in zip(queries, pieces, strict=True)]
    return torch.cat(attended).flatten(1, 2)


def _mixed_lengths() -> list[int]:
    rng = random.Random(0)
    return [min(LONGEST, max(4, round(rng.lognormvariate(5.1, 0.7)))) for _ in range(NUM_ROWS)]


def _scene(contexts: list[int], dtype: torch.dtype) -> tuple[RaggedBatch, list[KVLayer]]:
    tables = [-(-context // BLOCK_SIZE) for context in contexts]
    blocks = random.Random(0).sample(range(sum(tables)), sum(tables))
    work = [
        SequenceWork(i, (0,), context - 1, tuple(blocks.pop() for _ in range(length)), 0)
        for i, (context, length) in enumerate(zip(contexts, tables, strict=True))
    ]
    shape = (2, sum(tables), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    layers = [KVLayer(*torch.randn(shape).to(dtype)) for _ in range(NUM_LAYERS)]
    return RaggedBatch.build(work, BLOCK_SIZE, "cpu"), layers
