"""Fill a model with a checkpoint's tensors, and notice every way in which the two do not fit.

A config that contradicts its weights is the commonest broken checkpoint, and a parameter that stays unfilled shows only
as nonsense on the screen. So every parameter must be filled exactly once, by a tensor of its own shape.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from minipaged.errors import BrokenCheckpoint
from minipaged.model.layers import Linear, MergedLinear
from minipaged.model.llama import Llama
from minipaged.model.parallel import Part


def load_weights(model: Llama, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy each named tensor into its parameter, cast to the model's dtype on the way.

    The tensors are taken one at a time and none is kept: with a memory-mapped checkpoint the weights exist once, and a
    rank that holds a part of each reads from the disk no more than that part.

    Raises:
        BrokenCheckpoint: a tensor has another shape than the config gives it, is not in the model, comes twice, or is
            missing. The message names the tensor.
    """
    parameters = dict(model.named_parameters())  # a tied head is not in it: it is the embedding
    missing = dict.fromkeys(parameters)
    for name, tensor in weights:
        if _is_derived(name, model):
            continue
        if name not in parameters:
            raise BrokenCheckpoint("tensor", name, "the config describes a model without it")
        if name not in missing:
            raise BrokenCheckpoint("tensor", name, "it is in the weights twice")
        part = _part_of(parameters[name])
        if tuple(tensor.shape) != part.whole_shape:
            raise BrokenCheckpoint(f"shape of {name}", tuple(tensor.shape), f"the config makes it {part.whole_shape}")
        with torch.no_grad():
            parameters[name].copy_(part.take(tensor))
        del missing[name]
    if missing:
        raise BrokenCheckpoint("missing tensors", list(missing), "the config asks for them, the weights lack them")


def pack_weights(model: Llama, spare_bytes: float = 0) -> None:
    """The weights are complete: rearrange those of the linear layers for the CPU (packed.py), one at a time.

    Where it makes one row faster they are also kept as they were, if all that takes no more than `spare_bytes`.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    keep_plain = sum(linear.weight.nbytes for linear in linears) <= spare_bytes
    for kind in (MergedLinear, Linear):  # what is merged has nothing left to pack alone
        for module in model.modules():
            if isinstance(module, kind):
                module.pack(keep_plain)


def _part_of(parameter: torch.nn.Parameter) -> Part:
    """The whole tensor, unless a layer that is split over ranks has said which part of it (parallel.py)."""
    return getattr(parameter, "part", None) or Part(tuple(parameter.shape), lambda tensor: tensor)


def _is_derived(name: str, model: Llama) -> bool:
    """Whether some checkpoints store this tensor although it follows from the config or from another tensor."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.config.tie_word_embeddings)
