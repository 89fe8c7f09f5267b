"""Which device and which number format: "auto" resolved, the impossible refused."""

from __future__ import annotations

import torch

from minipaged.config import ModelConfig
from minipaged.errors import InvalidParameter


def resolve_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda") or (resolved.type == "cpu" and resolved.index):
        raise InvalidParameter("device", device, "must be auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InvalidParameter("device", device, f"this machine has {torch.cuda.device_count()} CUDA devices")
    return resolved


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """ "auto" is what the checkpoint is stored in."""
    return getattr(torch, config.dtype if name == "auto" else name)
