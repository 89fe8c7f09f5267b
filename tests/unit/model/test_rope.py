"""Rotary embedding: transformers' frequencies, bit for bit, and what rotations are good for."""

import pytest
import torch

from minipaged.config import RopeConfig
from minipaged.errors import UnsupportedModel
from minipaged.model.rope import compute_cos_sin, compute_inv_freq, rotate
from tests.tiny_llama import tiny_llama


@pytest.mark.parametrize("head_dim", [8, 24, 64])
@pytest.mark.parametrize("shape", ["gqa", "linear_rope", "llama3_rope"])
def test_inv_freq_is_transformers_own_to_the_last_bit(shape, head_dim):
    tiny = tiny_llama(shape, head_dim=head_dim)
    theirs = tiny.stock.model.rotary_emb.inv_freq.float()
    assert torch.equal(compute_inv_freq(tiny.config.rope, head_dim), theirs)


def test_the_llama3_shape_of_the_tests_has_planes_in_all_three_bands():
    rope = tiny_llama("llama3_rope").config.rope
    ratio = compute_inv_freq(rope, 8) / compute_inv_freq(RopeConfig("default", rope.theta), 8)
    assert (ratio == 1).any() and (ratio == 1 / rope.factor).any()
    assert ((ratio > 1 / rope.factor) & (ratio < 1)).any()


def test_an_unknown_rope_type_is_named():
    with pytest.raises(UnsupportedModel, match="rope type = 'yarn': default, linear and llama3"):
        compute_inv_freq(RopeConfig(kind="yarn"), 8)


def test_a_product_of_query_and_key_depends_only_on_their_distance():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    inv_freq = compute_inv_freq(RopeConfig(), 8)

    def product(query_position, key_position):
        q = rotate(query, *compute_cos_sin(torch.tensor([query_position]), inv_freq, torch.float64))
        k = rotate(key, *compute_cos_sin(torch.tensor([key_position]), inv_freq, torch.float64))
        return (q * k).sum().item()

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-12)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_half_types_are_turned_by_float32_angles():
    inv_freq = compute_inv_freq(RopeConfig(), 8)
    positions = torch.tensor([4001])  # not a bfloat16 number
    cos, sin = compute_cos_sin(positions, inv_freq, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.float32
    exact_cos, exact_sin = compute_cos_sin(positions, inv_freq, torch.float64)
    x = torch.ones(1, 1, 8, dtype=torch.bfloat16)
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert (turned.double() - rotate(x.double(), exact_cos, exact_sin)).abs().max() < 2**-8


def test_the_angles_are_computed_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        assert compute_inv_freq(RopeConfig("default", 10000.0), 8).device.type == "cpu"
