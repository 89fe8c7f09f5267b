"""SamplingParams: vLLM's names and defaults, one normal form, and a clear refusal of everything else."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams

HUGE = 10**400  # an integer that no float can hold

REFUSED = {
    "n": [0, -1, 1.0, True, None, "1"],
    "best_of": [0, -1, 2.0, False],
    "temperature": [-0.1, math.nan, math.inf, np.float32("inf"), HUGE, "1", None, True, 1j],
    "top_p": [0, -0.1, 1.0001, math.nan, None, "0.9", True],
    "top_k": [-2, 1.5, True, None, "5"],
    "min_p": [-0.1, 1.1, math.nan, None, False],
    "repetition_penalty": [0, -1, math.nan, math.inf, HUGE, None],
    "frequency_penalty": [-2.1, 2.1, math.nan, None],
    "presence_penalty": [-2.1, 2.1, math.nan, None],
    "seed": [1.5, True, "1", 2**64, -(2**63) - 1],
    "max_tokens": [0, -1, 1.5, True, "16"],
    "min_tokens": [-1, 0.5, None, True],
    "ignore_eos": [None, 0, 1, "yes"],
    "stop": ["", [""], ["a", ""], [1], 5, b"a", {"a": 1}],
    "stop_token_ids": [5, [-1], [1.5], ["1"], [True], "12"],
    "include_stop_str_in_output": [None, 1],
    "bad_words": ["word", [""], [1], 5],
    "allowed_token_ids": [[], [-1], [0.5], [True], 5],
    "logit_bias": [[1, 2], {1: 101}, {1: -101}, {1: math.nan}, {-1: 1}, {"x": 1}, {1.0: 1}, {1: 1, "1": 2}, {1: "1"}],
    "logprobs": [-2, 1.5, True, "5"],
    "prompt_logprobs": [-2, 1.5, True, "5"],
    "detokenize": [None, 0],
    "skip_special_tokens": [None, 0],
    "spaces_between_special_tokens": [None, 0],
}
ACCEPTED = {
    "n": [1, 5, np.int64(3)],
    "best_of": [None, 1, 7],
    "temperature": [0, 0.0, 1e-5, 2, 1e300, np.float32(0.5)],
    "top_p": [1, 1e-9, np.float64(0.9)],
    "min_p": [0, 1],
    "repetition_penalty": [1e-9, 1e300],
    "frequency_penalty": [-2, 2],
    "presence_penalty": [-2, 2],
    "seed": [None, 0, -7, 2**64 - 1, -(2**63), np.int32(4)],
    "max_tokens": [None, 1, 10**9],
    "logprobs": [None, 0, -1, 10**6],
    "prompt_logprobs": [None, 0, -1],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values])
def test_a_value_that_is_not_allowed_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(InvalidParameter, match=f"^{field} = ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in ACCEPTED.items() for v in values])
def test_a_value_at_the_edge_of_its_range_is_kept(field, value):
    kept = getattr(SamplingParams(**{"temperature": 1.0, field: value}), field)
    assert kept == value
    assert type(kept) in (int, float, type(None))  # NumPy's scalars became Python's


def test_every_field_has_values_that_it_refuses():
    assert REFUSED.keys() == asdict(SamplingParams()).keys()


def test_defaults_are_those_of_vllm():
    assert asdict(SamplingParams()) == {
        "n": 1,
        "best_of": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "bad_words": [],
        "allowed_token_ids": None,
        "logit_bias": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }


def test_values_are_brought_to_one_form():
    params = SamplingParams(
        stop="end",
        stop_token_ids=(np.int64(3), 3, 1),
        bad_words=("a", "b", "a"),
        logit_bias={"5": 1, 7: -100},
        top_k=-1,
        seed=-1,
        allowed_token_ids={4},
    )
    assert params.stop == ["end"]
    assert params.stop_token_ids == [3, 1]
    assert params.bad_words == ["a", "b"]
    assert params.logit_bias == {5: 1.0, 7: -100.0}
    assert params.top_k == 0
    assert params.seed is None
    assert params.allowed_token_ids == [4]


def test_a_copy_is_equal_and_is_checked_again():
    params = SamplingParams(stop=["a"], logit_bias={"1": 2}, top_k=-1, best_of=3, n=2)
    assert replace(params) == params
    params.top_p = 7
    with pytest.raises(InvalidParameter, match="top_p"):
        replace(params)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"n": 2, "temperature": 9e-6}, "n"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "a", "detokenize": False}, "stop"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, named):
    with pytest.raises(InvalidParameter, match=f"^{named} = "):
        SamplingParams(**fields)


def test_fields_that_only_look_contradictory_are_accepted():
    assert SamplingParams(n=2, best_of=2).num_samples == 2
    assert SamplingParams(n=2).num_samples == 2
    assert SamplingParams(best_of=4).num_samples == 4
    assert SamplingParams(min_tokens=10**6, max_tokens=None).max_tokens is None
    assert SamplingParams(n=2, temperature=1e-5).is_greedy is False
    assert SamplingParams(n=1, best_of=1, temperature=0).is_greedy is True


@pytest.mark.parametrize("field", ["use_beam_search", "length_penalty", "early_stopping"])
def test_a_field_of_beam_search_is_refused_with_the_place_where_it_belongs(field):
    with pytest.raises(InvalidParameter, match=rf"^{field} = .*LLM.beam_search\(prompts, BeamSearchParams"):
        SamplingParams(**{field: None})


@pytest.mark.parametrize("field", ["guided_decoding", "structured_outputs", "logits_processors"])
def test_a_field_of_vllm_that_is_not_supported_is_refused_by_name(field):
    with pytest.raises(InvalidParameter, match=f"^{field} = .*does not support"):
        SamplingParams(**{field: None})


def test_a_field_that_nobody_knows_is_refused_with_the_one_that_was_meant():
    with pytest.raises(InvalidParameter, match="temprature = .*no such option; did you mean temperature"):
        SamplingParams(temprature=1.0)
