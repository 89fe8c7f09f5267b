"""Weights in the layout that the CPU's matrix library wants, brought there once and not in every product.

A decode step multiplies few rows with every weight, so a library that first rearranges the weight spends as much on
that as on the product. oneDNN can keep its own layout: opaque to everybody else, and no larger. All linear layers of a
step of the default model, one core with AVX-512, as they lie → packed, in ms:

    rows            1          8         64         256        1024
    float32     43 →  53  114 →  78  250 → 250  728 → 704  3432 → 3042
    bfloat16    47 →  30   53 →  43   95 →  60  225 → 184   848 →  804

Alone in float32 one row loses. So there the weights are also kept as they lie, while memory is no question
(`pack_weights`), for batches of one: on two cores 26 → 19 ms. In bfloat16 that gains nothing.

Layers that read the same input are packed into one weight (`MergedLinear`), for each product costs something by itself.
On two cores, seven products a layer → four, in ms: float32 one row 31 → 28, 64 rows 93 → 90; bfloat16 18 → 14, 24 → 20.

To a compiler the packed product is one operation: its own code for these layouts wants weights that are constants,
and so another graph for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

EXPECTED_ROWS = 32  # what oneDNN chooses its layout for; 1 and 256 gave the same speed

_library = torch.library.Library("minipaged", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? plain, Tensor? bias) -> Tensor")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[out, in]` in the library's layout, opaque."""

    packed: torch.Tensor
    plain: torch.Tensor | None  # the same as it was, for one row alone, where that is faster

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it holds in memory."""
        return [self.packed] if self.plain is None else [self.packed, self.plain]

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`F.linear` with this weight: x [T, in] -> [T, out]."""
        return torch.ops.minipaged.packed_linear(x, self.packed, self.plain, bias)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight is of a kind, and this machine's torch of a build, for which there is a packed layout."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def gains_from_plain(dtype: torch.dtype) -> bool:
    """Whether one row is faster with the weight as it was."""
    return dtype == torch.float32


def pack(weight: torch.Tensor, keep_plain: bool) -> PackedWeight:
    """weight [out, in]; `keep_plain`: if there is something to gain from it, at twice the memory."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
    return PackedWeight(packed, weight if keep_plain and gains_from_plain(weight.dtype) else None)


def _compute(
    x: torch.Tensor, packed: torch.Tensor, plain: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    if plain is not None and x.shape[0] == 1:
        return F.linear(x, plain, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


for _key in ("CPU", "MkldnnCPU"):  # the first is x's, the second the packed weight's
    _library.impl("packed_linear", _compute, _key)


@torch.library.register_fake("minipaged::packed_linear", lib=_library)
def _shape(
    x: torch.Tensor, packed: torch.Tensor, plain: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])
