"""Attention backends: every fast one has a slow twin, and one argument switches between them.

| name | what |
|---|---|
| `reference` | the paper's equation, block by block: the explanation and the oracle |
| `gather` | collects each sequence's blocks, then calls torch's fused attention |
| `compiled` | reads keys and values where they lie, in loops that `torch.compile` makes |
| `triton` | reads them where they lie, in kernels of our own for a GPU |
"""

from __future__ import annotations

from minipaged.errors import InvalidParameter
from minipaged.model.attention.backend import AttentionBackend
from minipaged.model.attention.compiled import CompiledAttention
from minipaged.model.attention.gather import GatherAttention
from minipaged.model.attention.reference import ReferenceAttention
from minipaged.model.attention.triton_backend import TritonAttention

BACKENDS = {
    backend.name: backend for backend in (ReferenceAttention, GatherAttention, CompiledAttention, TritonAttention)
}
__all__ = ["BACKENDS", "AttentionBackend", "make_backend"]


def make_backend(name: str, compiled_model: bool = False) -> AttentionBackend:
    """The backend of that name; `"auto"` picks one, and its `name` says which.

    In a compiled model attention is a part of each layer's graph, so there only `compiled` will do.

    Raises:
        InvalidParameter: there is no such backend, or it cannot run here.
    """
    default = CompiledAttention if compiled_model else GatherAttention
    chosen = default.name if name == "auto" else name
    if compiled_model and chosen in BACKENDS and chosen != default.name:
        raise InvalidParameter("attention_backend", name, "with enforce_eager=False choose auto or compiled")
    if chosen not in BACKENDS:
        raise InvalidParameter("attention_backend", name, f"choose one of {', '.join(('auto', *BACKENDS))}")
    return BACKENDS[chosen]()
