"""The compiled model: one decoder layer, compiled once, runs them all.

All layers are one program with other weights and another KV layer, so weights and KV are inputs of its graph, and the
compiler has a thirtieth of the work that the whole model would give it. The program is the code of llama.py unchanged;
the `compiled` attention becomes a part of it. Between the matrix products everything is fused: norms, rotation, the
write into the pool, attention, SwiGLU, residuals.

The number of tokens and rows are unbacked lengths, about which the compiler may assume nothing. So every step, from
one decode to a full prefill, runs the same graph, and no request waits for a compilation later on.

What it gains over eager: `python -m minipaged.bench throughput` and `single`. On CUDA this is untested.

Embedding, last norm and logits stay as they are: there is nothing to fuse in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.decorators import mark_unbacked

from minipaged.model.attention.compiled import COMPILE_OPTIONS
from minipaged.model.kv_layer import KVLayer
from minipaged.model.llama import Llama, LlamaDecoderLayer

# Before each run of a graph torch would look whether it is still the right one: some hundred facts about the layer
# (guards), then sizes and strides of what passes between its kernels. But whatever differs between layers and steps is
# an input of unbacked length; the rest is the model, and does not change. One token alone takes 12 % less time without.
# (Torch still compares the inputs' fixed sizes: a pool of other blocks gets a graph of its own.)
LAYER_OPTIONS = {
    **COMPILE_OPTIONS,
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
    "size_asserts": False,
}


def compile_layers(model: Llama) -> None:
    """From now on the model's layers run compiled. Its first step compiles, for some seconds or minutes."""
    model.model.run_layer = CompiledLayer()


class CompiledLayer:
    """Stands in for the call of a decoder layer."""

    def __init__(self) -> None:
        # fullgraph: a break in the graph would be an error and not, in silence, a slower model.
        # isolate_recompiles: the graph is this model's own, so that without guards no other model can be given it.
        self._run = torch.compile(
            LlamaDecoderLayer.forward, dynamic=False, fullgraph=True, isolate_recompiles=True, options=LAYER_OPTIONS
        )

    def __call__(
        self,
        layer: LlamaDecoderLayer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVLayer,
        slots: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """The arguments of `LlamaDecoderLayer.forward`."""
        for tensor in (hidden, cos, sin, slots, *kv):  # [T, …], and the pools, [num_blocks, …]
            mark_unbacked(tensor, 0)
        return self._run(layer, hidden, cos, sin, kv, slots, metadata)
