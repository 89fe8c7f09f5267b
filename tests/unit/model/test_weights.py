"""Loading: every parameter is filled exactly once, by a tensor of its shape; all else is an error that names it."""

import re
from dataclasses import replace

import pytest
import torch

from minipaged.errors import BrokenCheckpoint
from minipaged.model.attention import make_backend
from minipaged.model.llama import Llama
from minipaged.model.weights import load_weights
from tests.tiny_llama import tiny_llama

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def empty_model(shape="gqa", dtype=torch.float64, **contradictions):
    return Llama(replace(tiny_llama(shape).config, **contradictions), make_backend("auto"), dtype, "cpu")


@pytest.mark.parametrize("shape", ["gqa", "biases", "tied"])
def test_every_parameter_gets_the_tensor_of_its_name(shape):
    weights = tiny_llama(shape).weights()
    model = empty_model(shape)
    load_weights(model, weights.items())
    assert {name: p.tolist() for name, p in model.named_parameters()} == {n: t.tolist() for n, t in weights.items()}


def test_tensors_are_cast_to_the_dtype_of_the_model():
    model = empty_model(dtype=torch.bfloat16)
    weights = tiny_llama().weights()
    load_weights(model, weights.items())
    assert torch.equal(model.get_parameter(Q_PROJ), weights[Q_PROJ].bfloat16())


def test_tensors_are_taken_one_at_a_time():
    alive = 0

    class Tracked(torch.Tensor):
        def __del__(self):
            nonlocal alive
            alive -= 1

    def stream():
        nonlocal alive
        for name, tensor in tiny_llama().weights().items():
            assert alive <= 1  # the one that the loop before this still names
            alive += 1
            yield name, tensor.clone().as_subclass(Tracked)

    load_weights(empty_model(), stream())


@pytest.mark.parametrize(
    "contradiction, name, found, expected",
    [
        ({"intermediate_size": 40}, "model.layers.0.mlp.gate_proj.weight", (48, 32), (40, 32)),
        ({"num_heads": 8}, Q_PROJ, (32, 32), (64, 32)),
        ({"vocab_size": 60}, "model.embed_tokens.weight", (61, 32), (60, 32)),
    ],
)
def test_a_config_that_contradicts_its_weights_is_told_with_both_shapes(contradiction, name, found, expected):
    message = f"shape of {name} = {found}: the config makes it {expected}"
    with pytest.raises(BrokenCheckpoint, match=re.escape(message)):
        load_weights(empty_model(**contradiction), tiny_llama().weights().items())


def test_missing_tensors_are_named():
    weights = tiny_llama().weights()
    del weights[Q_PROJ]
    with pytest.raises(BrokenCheckpoint, match=re.escape(f"missing tensors = ['{Q_PROJ}']")):
        load_weights(empty_model(), weights.items())


def test_a_config_with_more_layers_than_the_weights_is_told():
    with pytest.raises(BrokenCheckpoint, match=r"missing tensors = \['model\.layers\.2\."):
        load_weights(empty_model(num_layers=3), tiny_llama().weights().items())


def test_a_tensor_that_the_model_has_no_place_for_is_named():
    with pytest.raises(
        BrokenCheckpoint, match=r"tensor = 'model\.layers\.1\..*': the config describes a model without"
    ):
        load_weights(empty_model(num_layers=1), tiny_llama().weights().items())


def test_a_tensor_that_comes_twice_is_named():
    twice = [*tiny_llama().weights().items(), (Q_PROJ, tiny_llama().weights()[Q_PROJ])]
    with pytest.raises(BrokenCheckpoint, match=re.escape(f"tensor = '{Q_PROJ}': it is in the weights twice")):
        load_weights(empty_model(), twice)


def test_stored_frequencies_and_a_tied_head_are_passed_over():
    weights = tiny_llama("tied").weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["lm_head.weight"] = torch.full((61, 32), float("nan"))
    model = empty_model("tied")
    load_weights(model, weights.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
