"""An engine over a tiny Llama (tests/tiny_llama.py), in float64 unless told otherwise, its pool full of NaN."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import tokenizers
import torch

from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.loading import read_model_config
from minipaged.text.tokenizer import Tokenizer
from minipaged.worker.kv_cache import bytes_per_block
from minipaged.worker.worker import Worker


def make_engine(
    directory: Path,
    num_blocks: int,
    policy: Any = None,
    free_order: Any = None,
    eos_token_ids: tuple[int, ...] | None = None,
    tokenizer: Tokenizer | None = None,
    **args: Any,
) -> LLMEngine:
    """`directory` is what TinyLlama.save wrote; `args` are EngineArgs, and num_host_blocks in place of swap_space.
    `eos_token_ids` replace the model's own.
    """
    args = tiny_engine_args(directory, num_blocks, **args)
    worker = Worker(args)
    if eos_token_ids is not None:
        worker.config = dataclasses.replace(worker.config, eos_token_ids=eos_token_ids)
    worker.load(args.scheduler_config(worker.max_model_len).max_num_batched_tokens)
    with torch.inference_mode():
        fill_pools(worker, float("nan"))
    return LLMEngine(args, worker, tokenizer, policy=policy, free_order=free_order)


def tiny_engine_args(
    directory: Path, num_blocks: int, num_host_blocks: int = 0, dtype: str = "float64", **args: Any
) -> EngineArgs:
    """No tokenizer, and pools of so many blocks."""
    block_bytes = bytes_per_block(read_model_config(directory), args.get("block_size", 16), getattr(torch, dtype))
    return EngineArgs(
        model=directory,
        dtype=dtype,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=num_blocks,
        swap_space=num_host_blocks * block_bytes / 2**30,
        **args,
    )


def fill_pools(worker: Worker, value: float) -> None:
    for layer in worker.cache.layers + worker.host_cache.layers:
        for tensor in layer:
            tensor.fill_(value)


def tiny_tokenizer(vocab_size: int = 61) -> Tokenizer:
    """Each token is one to three of the letters a b c d, so stop strings begin and end inside of tokens."""
    words = ["".join(letters) for length in (1, 2, 3) for letters in itertools.product("abcd", repeat=length)]
    vocab = {word: i for i, word in enumerate(words[:vocab_size])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, {})
