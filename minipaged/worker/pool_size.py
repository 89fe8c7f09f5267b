"""How many blocks the pools have: what the user says, else what memory allows; and what else it allows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter

DEFAULT_CPU_BYTES = 1 << 30  # 1 GiB: 1,456 blocks of 16 tokens for the default model in float32
SPARE_SHARE = 1 / 16  # of the memory


def num_device_blocks(
    args: EngineArgs, block_bytes: int, max_model_len: int, device: torch.device, profile: Callable[[], None]
) -> int:
    """On CUDA the pool gets what `profile`, the largest step there can be, leaves of gpu_memory_utilization."""
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    if args.kv_cache_memory_bytes is not None:
        field, budget = "kv_cache_memory_bytes", args.kv_cache_memory_bytes
    elif device.type == "cuda":
        field, budget = "gpu_memory_utilization", _cuda_budget(args.gpu_memory_utilization, device, profile)
    else:
        one_sequence = -(-max_model_len // args.block_size) * block_bytes
        field, budget = "kv_cache_memory_bytes", max(DEFAULT_CPU_BYTES, one_sequence)
    if budget < block_bytes:
        raise InvalidParameter(field, getattr(args, field), f"leaves {budget} bytes; one block takes {block_bytes}")
    return budget // block_bytes


def num_host_blocks(args: EngineArgs, block_bytes: int) -> int:
    """The whole blocks that fit into `swap_space` GiB; none where nobody is ever swapped.

    More than there is would be promised by most systems all the same, and the process killed once it is used.
    """
    if args.preemption_mode == "recompute":
        return 0
    asked, memory = args.swap_space * 2**30, _host_memory()
    if asked > memory:
        raise InvalidParameter("swap_space", args.swap_space, f"this machine has {memory / 2**30:.1f} GiB of memory")
    return int(asked) // block_bytes


def spare_memory() -> float:
    """Bytes that may go for speed, as for weights in a second layout; none where the system tells nothing."""
    memory = _host_memory()
    return memory * SPARE_SHARE if math.isfinite(memory) else 0


def _host_memory() -> float:
    """Bytes of ordinary memory, used or not."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return math.inf


def _cuda_budget(utilization: float, device: torch.device, profile: Callable[[], None]) -> int:
    """Bytes left for KV: the share of the card that is ours, less the peak of a profiling run and what others hold."""
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held_by_others = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - peak - held_by_others
