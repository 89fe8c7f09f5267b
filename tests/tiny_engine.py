"""An engine over a tiny Llama in float64 (tests/tiny_llama.py), its pool full of NaN."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.worker.worker import Worker


def make_engine(
    directory: Path,
    num_blocks: int,
    policy: Any = None,
    free_order: Any = None,
    eos_token_ids: tuple[int, ...] | None = None,
    **args: Any,
) -> LLMEngine:
    """`directory` is what TinyLlama.save wrote; `args` are EngineArgs. `eos_token_ids` replace the model's own."""
    args = EngineArgs(
        model=directory, dtype="float64", skip_tokenizer_init=True, num_gpu_blocks_override=num_blocks, **args
    )
    worker = Worker(args)
    if eos_token_ids is not None:
        worker.config = dataclasses.replace(worker.config, eos_token_ids=eos_token_ids)
    worker.load(args.scheduler_config(worker.max_model_len).max_num_batched_tokens)
    with torch.inference_mode():
        for tensor in (tensor for layer in worker.cache.layers for tensor in layer):
            tensor.fill_(float("nan"))
    return LLMEngine(args, worker, policy=policy, free_order=free_order)
