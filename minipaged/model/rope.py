"""Rotary position embedding: a position becomes a rotation of each query and key.

Element i and element i + D/2 of a head form a plane; the token at position p turns by the angle p * inv_freq[i] in it.
So the product of a query and a key depends on how far apart they stand, and a key can be cached already turned.

The angles are computed for the positions of the step, once for all layers. `inv_freq` is computed in float32, as
transformers does, and promoted afterwards: in float64 the angles would otherwise be other ones.

A turn of (a, b) is (a cos − b sin, b cos + a sin): each element times the cosine, and its partner in the plane times
the sine, with its sign. Said so, whole heads are multiplied and nothing is put together from halves, which in bfloat16
costs more than all else here: a token alone comes 6 % sooner.

Letters: T tokens, H heads, D head_dim.
"""

from __future__ import annotations

import math

import torch

from minipaged.config import RopeConfig
from minipaged.errors import UnsupportedModel


def compute_inv_freq(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """The angle by which each plane turns from one position to the next, float32 `[D/2]` on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _stretch_llama3(inv_freq, rope)
    raise UnsupportedModel("rope type", rope.kind, "default, linear and llama3 are supported")


def _stretch_llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow planes are stretched by `factor`, fast ones stay as they are, those between are blended."""
    wavelengths = 2 * math.pi / inv_freq  # [D/2] in tokens
    turns = rope.original_max_position / wavelengths  # [D/2] full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: stretched, 1: untouched
    return (1 - blend) * inv_freq / rope.factor + blend * inv_freq


def compute_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every angle of the step.

    Args:
        positions: `[T]` integers.
        inv_freq: `[D/2]` from `compute_inv_freq`.
        dtype: the model's; the results are in it, but float32 at least.

    Returns:
        Two tensors `[T, 1, D]`, the same for every head: each plane's angle stands twice, once for either coordinate,
        and the first coordinate's sine is negative.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions.to(wide)[:, None] * inv_freq.to(wide)  # [T, D/2]
    cos, sin = angles.cos(), angles.sin()  # [T, D/2] each
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head of `x` `[T, H, D]` by its token's angles, `compute_cos_sin`'s.

    Computed in the precision of `cos`, returned in x's.
    """
    wide = x.to(cos.dtype)
    partner = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # [T, H, D] the other coordinate of the same plane
    return (wide * cos + partner * sin).to(x.dtype)
