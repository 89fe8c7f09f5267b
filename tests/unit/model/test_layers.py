"""RMSNorm's precision and order, and the dtype of logits."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minipaged.model.layers import Linear, MergedLinear, RMSNorm
from minipaged.model.parallel import weight_bytes
from minipaged.model.weights import pack_weights
from tests.tiny_llama import PagedPool, tiny_llama


def norms(dtype):
    torch.manual_seed(0)
    ours, theirs = RMSNorm(64, 1e-5, dtype, "cpu"), LlamaRMSNorm(64, 1e-5).to(dtype)
    weight = 1 + torch.randn(64, dtype=dtype)
    ours.weight.copy_(weight)
    theirs.weight.data.copy_(weight)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_casts_back_before_the_weight_as_transformers_does(dtype):
    ours, theirs = norms(dtype)
    x = torch.randn(50, 64).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_rms_norm_keeps_float64():
    ours, _ = norms(torch.float64)
    x = torch.randn(50, 64, dtype=torch.float64)
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * ours.weight
    assert (ours(x) - exact).abs().max() < 1e-14


@pytest.mark.parametrize(
    "dtype, logits_dtype",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_logits_are_float32_at_least_and_float64_stays(dtype, logits_dtype):
    pool = PagedPool(tiny_llama().model(dtype=dtype), block_size=4)
    assert pool.feed({0: [1, 2, 3]})[0].dtype == logits_dtype


@pytest.mark.parametrize("keep_plain", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_linear_layer_computes_the_same_for_any_number_of_rows(dtype, bias, keep_plain):
    torch.manual_seed(0)
    linear = Linear(64, 48, bias, dtype, "cpu")
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    exact = linear.weight.double()
    linear.pack(keep_plain)
    for num_rows in (1, 2, 7, 300):
        x = torch.randn(num_rows, 64).to(dtype)
        product = x.double() @ exact.T + (linear.bias.double() if bias else 0)
        assert linear(x).dtype == dtype
        assert (linear(x) - product).abs().max() < 128 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype, times", [(torch.float32, 2), (torch.bfloat16, 1)])
def test_weights_are_kept_as_they_were_only_where_that_gains_and_the_memory_is_spare(dtype, times):
    counted = {}
    for share in (None, 0.999, 1):
        model = tiny_llama("gqa").model("gather", dtype=dtype)
        linears = [module for module in model.modules() if isinstance(module, Linear)]
        size = sum(linear.weight.nbytes for linear in linears)
        before = weight_bytes(model)
        if share is not None:
            pack_weights(model, spare_bytes=share * size)
        counted[share] = (weight_bytes(model) - before) / size
    assert counted == {None: 0, 0.999: 0, 1: times - 1}


def test_weights_in_float64_are_left_as_they_are():
    linear = Linear(8, 8, False, torch.float64, "cpu")
    linear.pack()
    assert linear.packed is None and linear.weight is not None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_merged_layers_compute_what_each_of_them_does_packed_or_not(dtype, bias):
    torch.manual_seed(0)
    layers = [Linear(64, width, bias, dtype, "cpu") for width in (48, 16, 24)]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        parameter.copy_(torch.randn(parameter.shape))
    exact = [(layer.weight.double(), layer.bias.double() if bias else 0) for layer in layers]
    merged = MergedLinear(*layers)
    assert not list(merged.parameters())  # they are the layers' own
    x = torch.randn(5, 64).to(dtype)
    for step in (lambda: None, merged.pack):
        step()
        for found, (weight, added) in zip(merged(x), exact, strict=True):
            product = x.double() @ weight.T + added
            assert found.dtype == dtype
            assert (found - product).abs().max() <= 8 * torch.finfo(dtype).eps * product.abs().max()
    assert (merged.packed is None) == (dtype == torch.float64)
