"""Weights in the layout that the CPU's matrix library wants, brought there once and not in every product.

A decode step multiplies few rows with every weight, so a library that first rearranges the weight spends as much on
that as on the product. oneDNN can keep its own layout: opaque to everybody else, and no larger. All linear layers of a
step of the default model, one core with AVX-512, as they lie → packed, in ms:

    rows            1          8         64         256        1024
    float32     43 →  53  114 →  78  250 → 250  728 → 704  3432 → 3042
    bfloat16    47 →  30   53 →  43   95 →  60  225 → 184   848 →  804

(Alone in float32 one row loses, which a second copy of the weights could mend: not worth twice the memory.)

Layers that read the same input are packed into one weight (`MergedLinear`), for each product costs something by itself.
On two cores, seven products a layer → four, in ms: float32 one row 31 → 28, 64 rows 93 → 90; bfloat16 18 → 14, 24 → 20.

To a compiler the packed product is one operation: its own code for these layouts wants weights that are constants,
and so another graph for each layer.
"""

from __future__ import annotations

import torch

EXPECTED_ROWS = 32  # what oneDNN chooses its layout for; 1 and 256 gave the same speed

_library = torch.library.Library("minipaged", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight is of a kind, and this machine's torch of a build, for which there is a packed layout."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight [out, in] -> the same, opaque, for `packed_linear` alone."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` with a packed weight: x [T, in] -> [T, out]."""
    return torch.ops.minipaged.packed_linear(x, weight, bias)


def _compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


for _key in ("CPU", "MkldnnCPU"):  # the first is x's, the second the packed weight's
    _library.impl("packed_linear", _compute, _key)


@torch.library.register_fake("minipaged::packed_linear", lib=_library)
def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
