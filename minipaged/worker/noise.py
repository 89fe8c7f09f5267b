"""Randomness without state: the noise of a token is a hash, and no generator is kept anywhere.

A token drawn by Gumbel-max is `argmax(logit / T + g)`, where each token's g is an independent draw from the standard
Gumbel distribution: token v then wins with probability softmax(logit / T)[v] (Maddison, Tarlow and Minka, 2014).
Usually a generator makes g, and every preemption, fork or change of the batch must carry that generator along, in the
right state. Here g is a function of three integers:

    seed, output position ──▶ key of the row ──▶ splitmix64 stream ──▶ token v reads its output number v ──▶ g

so a token meets the same noise when its sequence is recomputed, shares a batch, or has other tokens masked.

splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) adds a constant to a
64-bit counter and scrambles it, so output number v is one multiplication away, not v steps. Integers wrap modulo 2^64
on every device: the bits are the same everywhere. The two logarithms are float64's, which agree to the last bit or two.

Shapes: R rows, C tokens a row.
"""

from __future__ import annotations

from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed integer: torch has no arithmetic on uint64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _xor_shifted(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >>> bits), in place. torch shifts int64 arithmetically: the sign bits that come in are masked off."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def splitmix64(counter: Tensor) -> Tensor:
    """What splitmix64 returns when its counter has become `counter`. [...] int64 -> [...] int64, in place."""
    counter = _xor_shifted(counter, 30).mul_(_MIX_1)
    counter = _xor_shifted(counter, 27).mul_(_MIX_2)
    return _xor_shifted(counter, 31)


def random_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """53 random bits for each token, as integers from 0 to 2^53 - 1.

    seeds [R], positions [R], token_ids [C] or [R, C], all int64 -> [R, C] int64.
    """
    # The seed is scrambled before the position is added: the streams of (seed + 1, p) and (seed, p + 1) are unrelated.
    keys = splitmix64(splitmix64(seeds + GAMMA) + positions)  # [R]
    counters = token_ids * GAMMA + (keys + GAMMA)[:, None]  # [R, C]: output number v follows v + 1 steps
    return (splitmix64(counters) >> 11).bitwise_and_((1 << 53) - 1)


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for each token, from -3.61 to 36.74.

    seeds [R], positions [R], token_ids [C] or [R, C], all int64 -> [R, C] float64.
    """
    odd = random_bits(seeds, positions, token_ids).bitwise_or_(1)
    # An odd multiple of 2^-53 is exact in float64, and is neither 0 nor 1: both logarithms are finite.
    uniform = odd.double().mul_(2.0**-53)  # [R, C], inside (0, 1)
    return uniform.log_().neg_().log_().neg_()
