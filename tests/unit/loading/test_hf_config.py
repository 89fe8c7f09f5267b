"""config.json: old keys and new, and every value that would change the arithmetic refused by name."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, MistralConfig

from minipaged.config import RopeConfig
from minipaged.errors import BrokenCheckpoint, ModelNotFound, UnsupportedModel
from minipaged.loading import read_model_config

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


def read(directory, generation=None, **changes):
    config = {key: value for key, value in {**PLAIN, **changes}.items() if value != "left out"}
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(directory)


def test_what_is_left_out_means_what_it_means_in_transformers(tmp_path):
    config = read(tmp_path)
    theirs = LlamaConfig(**PLAIN)
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim) == (4, 16)
    assert (config.rms_norm_eps, config.rope) == (theirs.rms_norm_eps, RopeConfig(theta=10_000.0))
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert config.dtype == "float32"


def test_what_transformers_saves_is_read_back(tmp_path):
    given = {"num_key_value_heads": 2, "head_dim": 32, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-4}
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}
    theirs = LlamaConfig(
        **{**PLAIN, **given}, rope_parameters=rope, tie_word_embeddings=True, eos_token_id=[7, 8], dtype="bfloat16"
    )
    theirs.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (2, 32, 1e-4)
    assert config.attention_bias and config.mlp_bias and config.tie_word_embeddings
    assert config.rope == RopeConfig("llama3", 500_000.0, 8.0, 1.0, 4.0, 256)
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((7, 8), 1, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig("linear", 1e4, 2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            RopeConfig("linear", 5e5, 2.0),
        ),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, RopeConfig("llama3", 1e4, 8.0, 1.0, 4.0, 256)),
    ],
)
def test_old_and_new_rope_keys_mean_the_same(tmp_path, changes, rope):
    assert read(tmp_path, **changes).rope == rope


@pytest.mark.parametrize(
    ("generation", "changes", "eos"),
    [
        (None, {"eos_token_id": 2}, (2,)),
        (None, {}, ()),
        ({}, {"eos_token_id": [2, 3]}, (2, 3)),
        ({"eos_token_id": 5}, {"eos_token_id": 2}, (5,)),
        ({"eos_token_id": [5, 6]}, {}, (5, 6)),
    ],
)
def test_the_generation_config_has_the_first_word_on_end_of_sequence(tmp_path, generation, changes, eos):
    assert read(tmp_path, generation, **changes).eos_token_ids == eos


@pytest.mark.parametrize("window", [None, 512])
def test_a_mistral_whose_window_never_closes_is_a_llama(tmp_path, window):
    assert read(tmp_path, **MISTRAL, sliding_window=window).num_kv_heads == 2


def test_a_mistral_with_a_window_is_refused_also_where_the_window_is_the_default(tmp_path):
    with pytest.raises(UnsupportedModel, match="sliding_window = 256"):
        read(tmp_path, **MISTRAL, sliding_window=256)
    with pytest.raises(UnsupportedModel, match=f"sliding_window = {MistralConfig().sliding_window}"):
        read(tmp_path, **MISTRAL, max_position_embeddings=8192)
    with pytest.raises(BrokenCheckpoint, match="num_key_value_heads"):
        read(tmp_path, **{**MISTRAL, "num_key_value_heads": "left out"}, sliding_window=None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Qwen2ForCausalLM.*LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "gemma"}, "gemma"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_another_arithmetic_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "left out"),
        ("hidden_size", -64),
        ("hidden_size", 66),
        ("intermediate_size", 96.0),
        ("num_hidden_layers", True),
        ("num_attention_heads", "4"),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", 0),
        ("rope_theta", "big"),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", 1000),
        ("eos_token_id", [2, "3"]),
        ("rope_parameters", "default"),
    ],
)
def test_a_value_that_makes_no_sense_names_its_key(tmp_path, key, value):
    with pytest.raises(BrokenCheckpoint, match=key):
        read(tmp_path, **{key: value})


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_llama3_scaling_needs_its_parameters(tmp_path, missing):
    scaling = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(BrokenCheckpoint, match=missing):
        read(tmp_path, rope_scaling={"rope_type": "llama3", **scaling})


@pytest.mark.parametrize("text", ["{", "[1]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_a_broken_checkpoint(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BrokenCheckpoint, match="config.json"):
        read_model_config(tmp_path)


def test_a_directory_that_is_no_model_says_so(tmp_path):
    with pytest.raises(ModelNotFound, match="holds no config.json"):
        read_model_config(tmp_path)
    with pytest.raises(ModelNotFound, match="does not exist"):
        read_model_config(tmp_path / "nowhere")
