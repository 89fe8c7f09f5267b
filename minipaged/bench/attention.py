"""One layer's attention by backend: 64 decodes with contexts of mixed length, in the default model's shape."""

from __future__ import annotations

import random
import statistics
import time

import torch

from minipaged.bench.report import Report
from minipaged.bench.roofs import gbytes_per_second
from minipaged.engine_args import EngineArgs
from minipaged.model.attention import BACKENDS, make_backend
from minipaged.model.attention.triton_backend import TritonAttention
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer
from minipaged.step import SequenceWork

NUM_ROWS, LONGEST, BLOCK_SIZE = 64, 700, 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
NUM_LAYERS = 8  # used in turn, so that no layer's keys and values are in the cache from the last time


@torch.inference_mode()
def measure(args) -> list[Report]:
    """Every backend that a CPU has, in turn on the same batch; `reference` only a few times, for it is slow."""
    name = EngineArgs(dtype=args.dtype).dtype
    dtype = torch.float32 if name == "auto" else getattr(torch, name)
    contexts, batch, layers = _scene(dtype)
    query = torch.randn(NUM_ROWS, NUM_HEADS, HEAD_DIM).to(dtype)
    backends = {name: make_backend(name) for name in BACKENDS if name != TritonAttention.name}
    prepared = {name: backend.prepare(batch, NUM_HEADS, NUM_KV_HEADS, dtype) for name, backend in backends.items()}
    timed: dict[str, list[float]] = {name: [] for name in backends}
    for repeat in range(args.repeats * NUM_LAYERS + 1):
        for name, backend in backends.items():
            if name == "reference" and repeat > args.repeats:
                continue
            begin = time.perf_counter()
            backend.forward(query, layers[repeat % NUM_LAYERS], prepared[name])
            if repeat > 0:  # the first is a warm-up, and compiles
                timed[name].append(1e3 * (time.perf_counter() - begin))

    memory = gbytes_per_second()
    gbytes = 2 * sum(contexts) * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize / 1e9
    report = Report(f"one layer, {NUM_ROWS} decodes, contexts {sum(contexts) / NUM_ROWS:.0f} on average, {dtype}")
    for name, times in timed.items():
        ms = statistics.median(times)
        report.add(backend=name, ms=ms, fastest_ms=min(times), KV_GB_per_s=1e3 * gbytes / ms)
    report.notes.append(f"roof: {memory:.1f} GB/s read, {1e3 * gbytes / memory:.2f} ms")
    report.notes.append("triton is left out: its kernels are for a GPU, and these keys and values are on the CPU")
    return [report]


def _scene(dtype: torch.dtype) -> tuple[list[int], RaggedBatch, list[KVLayer]]:
    rng = random.Random(0)
    contexts = [min(LONGEST, max(4, round(rng.lognormvariate(5.1, 0.7)))) for _ in range(NUM_ROWS)]
    tables = [-(-context // BLOCK_SIZE) for context in contexts]
    blocks = rng.sample(range(sum(tables)), sum(tables))
    work = [
        SequenceWork(i, (0,), context - 1, tuple(blocks.pop() for _ in range(length)), 0)
        for i, (context, length) in enumerate(zip(contexts, tables, strict=True))
    ]
    shape = (2, sum(tables), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    layers = [KVLayer(*torch.randn(shape).to(dtype)) for _ in range(NUM_LAYERS)]
    return contexts, RaggedBatch.build(work, BLOCK_SIZE, "cpu"), layers
