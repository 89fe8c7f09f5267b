"""The compiled model: one decoder layer, compiled once, runs them all.

All layers are one program with other weights and another KV layer, so weights and KV are inputs of its graph, and the
compiler has a thirtieth of the work that the whole model would give it. The program is the code of llama.py unchanged;
the `compiled` attention becomes a part of it. Between the matrix products everything is fused: norms, rotation, the
write into the pool, attention, SwiGLU, residuals.

The number of tokens and rows are unbacked lengths, about which the compiler may assume nothing but which of them are
the same (`shape_id`). So every step, from one decode to a full prefill, runs the same graph, and no request waits for a
compilation later on.

torch.compile watches a function run (Dynamo), makes a graph of what it saw, and generates code from the graph
(Inductor). All that is needed once. But every later call also passes through what torch.compile puts around the code:
whether it still fits, whether gradients are kept, which input goes where. So a layer here calls the generated code
itself, which shortens a step of few rows by 5 to 9 %. The code wants a list of inputs, and Dynamo says of each where it
comes from: `L['kv'].key`, with L the arguments by name.

What it gains over eager: `python -m minipaged.bench throughput` and `single`. On CUDA this is untested.

Embedding, last norm and logits stay as they are: there is nothing to fuse in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule

from minipaged.errors import InvalidParameter
from minipaged.model.attention.compiled import COMPILE_OPTIONS
from minipaged.model.kv_layer import KVLayer
from minipaged.model.llama import Llama, LlamaDecoderLayer

# A program is run without a look whether it is still the right one. Whatever differs between layers and steps is an
# input of unbacked length; the rest is the model, and does not change. So only blocks of another shape get a program of
# their own, and no tensor may be a constant of it (freezing): the next layer has another one.
LAYER_OPTIONS = {**COMPILE_OPTIONS, "size_asserts": False, "freezing": False}

_one_at_a_time = threading.Lock()  # torch's options are the process's: they are changed, and changed back

# The arguments of `LlamaDecoderLayer.forward` by name -> what it returns, [T, E].
Program = Callable[[dict[str, Any]], torch.Tensor]


def compile_layers(model: Llama) -> None:
    """From now on the model's layers run compiled. Its first step compiles, for some seconds or minutes."""
    model.model.run_layer = CompiledLayer()


class CompiledLayer:
    """Stands in for the call of a decoder layer."""

    def __init__(self) -> None:
        self._programs: dict[torch.Size, Program] = {}  # by the shape of a block

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
        arguments = dict(self=layer, hidden=hidden, cos=cos, sin=sin, kv=kv, slots=slots, metadata=metadata)
        block = kv.key.shape[1:]
        if block not in self._programs:
            for tensor in (hidden, cos, sin, slots):
                mark_unbacked(tensor, 0, shape_id="T")
            for pool in kv:
                mark_unbacked(pool, 0, shape_id="num_blocks")
            self._programs[block] = _compile(arguments)
        return self._programs[block](arguments)


def _compile(arguments: dict[str, Any]) -> Program:
    """Run `LlamaDecoderLayer.forward` under torch.compile, and keep the code that is generated for it.

    The run's output is dropped: the keys and values that it writes, the next run writes again.

    Raises:
        InvalidParameter: torch.compile does not compile here.
    """
    programs: list[Program] = []

    def backend(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Dynamo hands the graph to this instead of to Inductor, so that the generated code can be kept on the way."""

        def generate(*args: Any, **kwargs: Any) -> Any:
            generated = compile_fx_inner(*args, **kwargs)
            programs.append(_program(graph_inputs, generated.current_callable))
            return generated

        graph_inputs = _inputs(graph)
        # torch's cache of compiled functions would skip `generate`; the generated code, which takes long, has its own.
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(graph, examples, inner_compile=generate)

    # What Dynamo has compiled it keeps by code object, and gives to whoever runs the same: so each program has a copy.
    # fullgraph: a break in the graph would be an error and not, in silence, a slower model.
    source = LlamaDecoderLayer.forward
    copy = FunctionType(source.__code__.replace(), source.__globals__)
    with _one_at_a_time, inductor_config.patch(LAYER_OPTIONS), torch.no_grad():
        torch.compile(copy, backend=backend, dynamic=False, fullgraph=True)(**arguments)
    if len(programs) != 1:  # none, or some for parts of a layer
        allowed = "torch.compile is switched off here, by TORCHDYNAMO_DISABLE or by a stance of torch.compiler"
        raise InvalidParameter("enforce_eager", False, allowed)
    return programs[0]


def _inputs(graph: GraphModule) -> Callable[[dict[str, Any]], list[Any]]:
    """Collects the graph's inputs, in its order: tensors, and lengths such as `L['hidden'].size()[0]`.

    Their sources are expressions of Python over L, the arguments by name; so together they are a function of L.
    """
    sources = [node._dynamo_source.name for node in graph.graph.find_nodes(op="placeholder")]
    return eval(f"lambda L: [{', '.join(sources)}]")


def _program(inputs: Callable[[dict[str, Any]], list[Any]], run: Callable[[list[Any]], Any]) -> Program:
    """`run` is the generated code. It empties the list that it is given, and returns the graph's outputs: one."""

    def program(arguments: dict[str, Any]) -> torch.Tensor:
        (output,) = run(inputs(arguments))
        return output

    return program
