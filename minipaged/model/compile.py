"""The compiled model: one decoder layer, compiled once, runs them all.

All layers are one program with other weights and another KV layer, so weights and KV are inputs of its graph, and the
compiler has a thirtieth of the work that the whole model would give it. The program is the code of llama.py unchanged;
the `compiled` attention becomes a part of it. Between the matrix products everything is fused: norms, rotation, the
write into the pool, attention, SwiGLU, residuals.

The number of tokens and rows are unbacked lengths, about which the compiler may assume nothing but which of them are
the same (`shape_id`). So every step, from one decode to a full prefill, runs the same graph, and no request waits for a
compilation later on.

Dynamo, the part of torch.compile that watches Python run, is needed once: it rewrites the layer's function into one
that calls the graph. Every later call goes straight to the rewritten function, as in vLLM. To let Dynamo look again at
each layer took 3 to 4 ms of each step, a tenth of the time of one token alone.

What it gains over eager: `python -m minipaged.bench throughput` and `single`. On CUDA this is untested.

Embedding, last norm and logits stay as they are: there is nothing to fuse in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.decorators import mark_unbacked

from minipaged.errors import InvalidParameter
from minipaged.model.attention.compiled import COMPILE_OPTIONS
from minipaged.model.kv_layer import KVLayer
from minipaged.model.llama import Llama, LlamaDecoderLayer

# A program is run without a look whether it is still the right one. Whatever differs between layers and steps is an
# input of unbacked length; the rest is the model, and does not change. Only other blocks get a program of their own.
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
        self._programs: dict[torch.Size, Callable[..., torch.Tensor]] = {}  # by the shape of a block

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
        block = kv.key.shape[1:]
        if block not in self._programs:
            for tensor in (hidden, cos, sin, slots):
                mark_unbacked(tensor, 0, shape_id="T")
            for pool in kv:
                mark_unbacked(pool, 0, shape_id="num_blocks")
            self._programs[block] = _compile(layer, hidden, cos, sin, kv, slots, metadata)
        return self._programs[block](layer, hidden, cos, sin, kv, slots, metadata)


def _compile(*arguments: Any) -> Callable[..., torch.Tensor]:
    """Run `LlamaDecoderLayer.forward` under torch.compile, and keep the function that it makes of it.

    The run's output is dropped: the keys and values that it writes, the next run writes again.

    Raises:
        InvalidParameter: torch.compile does not compile here.
    """
    # fullgraph: a break in the graph would be an error and not, in silence, a slower model.
    # isolate_recompiles: the graph is this model's own, so that without guards no other model can be given it.
    source = LlamaDecoderLayer.forward
    compiled = torch.compile(source, dynamic=False, fullgraph=True, isolate_recompiles=True, options=LAYER_OPTIONS)
    rewritten: list[CodeType] = []
    thread = threading.get_ident()

    def keep(before: CodeType, after: CodeType) -> None:
        # The hook hears of every compilation in the process: another thread may be compiling another model's layer.
        if before is source.__code__ and threading.get_ident() == thread:
            rewritten.append(after)

    hook = register_bytecode_hook(keep)
    try:
        compiled(*arguments)
    finally:
        hook.remove()
    if not rewritten:
        allowed = "torch.compile is switched off here, by TORCHDYNAMO_DISABLE or by a stance of torch.compiler"
        raise InvalidParameter("enforce_eager", False, allowed)
    return FunctionType(rewritten[0], _globals_of(rewritten[0], source.__globals__))


def _globals_of(code: CodeType, namespace: dict[str, Any]) -> dict[str, Any]:
    """What of `namespace` the code names; functions of Dynamo's own, as they are beneath their wrapper.

    Those read the lengths of tensors, ten times a layer. The wrapper, which keeps Dynamo from looking into them, takes
    most of their time: 0.03 ms of each layer.
    """
    helpers = {name: getattr(dynamo_utils, name) for name in code.co_names if hasattr(dynamo_utils, name)}
    unwrapped = SimpleNamespace(**{name: getattr(helper, "__wrapped__", helper) for name, helper in helpers.items()})
    named = {name: namespace[name] for name in code.co_names if name in namespace}
    return {name: unwrapped if value is dynamo_utils else value for name, value in named.items()}
