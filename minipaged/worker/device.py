"""Which device and which number format: "auto" resolved, the impossible refused."""

from __future__ import annotations

import torch

from minipaged.config import ModelConfig
from minipaged.errors import InvalidParameter
from minipaged.model.ranks import ALONE, Ranks


def resolve_device(device: str, ranks: Ranks = ALONE) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU. Of several ranks on CUDA, each has the device of its number."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda") or (resolved.type == "cpu" and resolved.index):
        raise InvalidParameter("device", device, "must be auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InvalidParameter("device", device, f"this machine has {torch.cuda.device_count()} CUDA devices")
    return resolved if ranks.size == 1 or resolved.type == "cpu" else _device_of_rank(resolved, ranks)


def _device_of_rank(cuda: torch.device, ranks: Ranks) -> torch.device:
    if cuda.index is not None:
        raise InvalidParameter("device", str(cuda), f"{ranks.size} ranks need one device each: say cuda")
    count = torch.cuda.device_count()
    if ranks.size > count:
        raise InvalidParameter(
            "tensor_parallel_size", ranks.size, f"this machine has {count} CUDA devices, and each rank needs one"
        )
    return torch.device("cuda", ranks.rank)


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """ "auto" is what the checkpoint is stored in."""
    return getattr(torch, config.dtype if name == "auto" else name)
