"""The worker: applies a plan and decides nothing (paper, section 4.6).

    plan ──▶ moves between blocks ──▶ ragged batch ──▶ model ──▶ logits of the rows that sample ──▶ draws ──▶ result

It holds the weights and the KV pool. It knows no request, no queue and no free block: a plan names rows, blocks and
slots.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter
from minipaged.loading import find_model, read_model_config, read_weights
from minipaged.loading.progress import progress_line
from minipaged.model.attention import make_backend
from minipaged.model.attention.compiled import CompiledAttention
from minipaged.model.batch import RaggedBatch
from minipaged.model.compile import compile_layers
from minipaged.model.llama import Llama
from minipaged.model.ranks import ALONE, Ranks, check_split, split_heads
from minipaged.model.weights import load_weights, pack_weights
from minipaged.step import SequenceWork, StepPlan, StepResult
from minipaged.worker.device import resolve_device, resolve_dtype
from minipaged.worker.kv_cache import KVCache, bytes_per_block, copy_blocks
from minipaged.worker.pool_size import num_device_blocks, num_host_blocks, spare_memory
from minipaged.worker.results import answer_plan


class Worker:
    """One rank: the model's weights, the KV pool, and the sampler; of several ranks, its share of the first two.

    Construction finds the model and settles device, dtype and lengths, and so is quick to refuse; `load` reads the
    weights and allocates the pool.
    """

    def __init__(self, args: EngineArgs, ranks: Ranks = ALONE) -> None:
        self.args = args
        self.ranks = ranks
        self.path = find_model(args.model)
        self.tokenizer_source = self._find_tokenizer()
        self.config = read_model_config(self.path)
        check_split(self.config, ranks.size)
        self._kv_config = replace(self.config, num_kv_heads=split_heads(self.config.num_kv_heads, ranks).size)
        self.device = resolve_device(args.device, ranks)
        self.dtype = resolve_dtype(args.dtype, self.config)
        self.max_model_len = self._max_model_len()
        self.backend = make_backend(args.attention_backend, compiled_model=not args.enforce_eager)
        self.backend.check_can_run(self.config, args.block_size, self.dtype, self.device)

    @torch.inference_mode()
    def load(self, max_num_batched_tokens: int) -> None:
        """Read the weights, then give the pool what memory is left for it."""
        self.model = Llama(self.config, self.backend, self.dtype, self.device, self.ranks)
        load_weights(self.model, read_weights(self.path))
        pack_weights(self.model, spare_memory() / self.ranks.size)
        if not self.args.enforce_eager:
            compile_layers(self.model)
        block_bytes = bytes_per_block(self._kv_config, self.args.block_size, self.dtype)
        num_blocks = num_device_blocks(
            self.args, block_bytes, self.max_model_len, self.device, lambda: self._run_largest(max_num_batched_tokens)
        )
        # A block number means the same on every rank, so the pools have the size of the smallest one.
        self.cache = self._make_cache(min(self.ranks.collect(num_blocks)), self.device)
        host_blocks = min(self.ranks.collect(num_host_blocks(self.args, block_bytes)))
        self.host_cache = self._make_cache(host_blocks, torch.device("cpu"))
        if self.backend.name == CompiledAttention.name:
            with progress_line("compiling (half a minute the first time, some seconds when that is cached)"):
                self._compile()

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.host_cache.num_blocks

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply one plan, and answer it."""
        return answer_plan(plan, self.forward(plan), self.model.compute_logits)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """The order is the contract's: moves first, then the model, which writes before it reads. Returns `[T, E]`."""
        copy_blocks(self.cache, self.host_cache, plan.swap_out)
        copy_blocks(self.host_cache, self.cache, plan.swap_in)
        copy_blocks(self.cache, self.cache, plan.copies)
        return self._run(plan.work, self.cache) if plan.work else torch.empty(0, self.config.hidden_size)

    def _run(self, work: Sequence[SequenceWork], cache: KVCache) -> torch.Tensor:
        """The final hidden states of the rows' tokens, `[T, E]`; their keys and values are written into the pool."""
        return self.model(RaggedBatch.build(work, self.args.block_size, self.device), cache.layers)

    def close(self) -> None:
        """End what runs beside this process; one rank has nothing of the kind."""

    def _find_tokenizer(self) -> Any:
        """The model's directory unless the user says otherwise: another one, a hub id, or a ready tokenizer."""
        asked = self.args.tokenizer
        if asked is None:
            return self.path
        return find_model(asked) if isinstance(asked, (str, os.PathLike)) else asked

    def _max_model_len(self) -> int:
        asked, limit = self.args.max_model_len, self.config.max_position
        if asked is not None and asked > limit:
            raise InvalidParameter("max_model_len", asked, f"the model's positions end at {limit}")
        return asked or limit

    def _make_cache(self, num_blocks: int, device: torch.device) -> KVCache:
        pinned = device != self.device and self.device.type == "cuda"
        try:
            return KVCache(self._kv_config, num_blocks, self.args.block_size, self.dtype, device, pinned)
        except (RuntimeError, OverflowError, TypeError) as error:  # torch's words for too much, and for far too much
            what = f"number of KV blocks on {device}"
            raise InvalidParameter(what, num_blocks, f"do not fit into memory ({error})") from error

    def _compile(self) -> None:
        """The first step compiles: also when the machine's compiler cannot, it says so now and not in a request."""
        try:
            self._run([SequenceWork(0, (0,), 0, (0,), 0)], self.cache)
        except BackendCompilerFailed as error:
            allowed = f"needs a C++ compiler that works, and this one failed: {error}"
            raise InvalidParameter("attention_backend", self.backend.name, allowed) from error

    def _run_largest(self, num_tokens: int) -> None:
        """The step that needs the most memory: every token of the budget in one prompt, on a pool just for it."""
        num_tokens = min(num_tokens, self.max_model_len)
        num_blocks = -(-num_tokens // self.args.block_size)
        work = SequenceWork(0, (0,) * num_tokens, 0, tuple(range(num_blocks)), 0)
        hidden = self._run([work], self._make_cache(num_blocks, self.device))
        self.model.compute_logits(hidden[-self.args.max_num_seqs :])
