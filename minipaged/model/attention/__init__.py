"""Attention backends: every fast one has a slow twin, and one argument switches between them.

| name | what |
|---|---|
| `reference` | the paper's equation, block by block: the explanation and the oracle |
| `gather` | collects each sequence's blocks, then calls torch's fused attention |
"""

from __future__ import annotations

from minipaged.errors import InvalidParameter
from minipaged.model.attention.backend import AttentionBackend
from minipaged.model.attention.gather import GatherAttention
from minipaged.model.attention.reference import ReferenceAttention

BACKENDS = {backend.name: backend for backend in (ReferenceAttention, GatherAttention)}
DEFAULT_BACKEND = GatherAttention.name

__all__ = ["BACKENDS", "DEFAULT_BACKEND", "AttentionBackend", "make_backend"]


def make_backend(name: str) -> AttentionBackend:
    """The backend of that name; `"auto"` picks one, and its `name` says which.

    Raises:
        InvalidParameter: there is no such backend.
    """
    chosen = DEFAULT_BACKEND if name == "auto" else name
    if chosen not in BACKENDS:
        raise InvalidParameter("attention_backend", name, f"choose one of {', '.join(('auto', *BACKENDS))}")
    return BACKENDS[chosen]()
