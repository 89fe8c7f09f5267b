"""What an engine refuses, with the field, the value and what is allowed; and that it goes on afterwards."""

from __future__ import annotations

import pickle

import pytest

from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidInput, InvalidParameter, InvalidPrompt
from minipaged.sampling_params import SamplingParams
from tests.unit.engine.test_llm_engine import add, make_engine, run


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "at least one token"),
        ({"prompt_token_ids": [50]}, "from 0 to 49"),
        ({"prompt_token_ids": [-1]}, "from 0 to 49"),
        ({"prompt_token_ids": [1.5]}, "list of integers"),
        ({"prompt_token_ids": [True]}, "list of integers"),
        ({"prompt_token_ids": "12"}, "list of integers"),
        ({"prompt_token_ids": [1] * 60}, "60 tokens; at most 59"),
        ({"prompt_token_ids": [1] * 57}, "needs 15 KV blocks of 4 tokens; the pool has 14"),
        ({"prompt": "hello"}, "no tokenizer"),
        ("hello", "no tokenizer"),
        ({"prompt_token_ids": [1], "prompt": "x"}, "must be a string"),
        ({"text": "x"}, "must be a string"),
        ({}, "must be a string"),
        (7, "must be a string"),
        (None, "must be a string"),
        ({"prompt_token_ids": [1], "cache_salt": 7}, "cache_salt = 7: must be a string"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, "must be a string of valid Unicode"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_with_the_reason(prompt, message):
    engine = make_engine(num_blocks=14)
    with pytest.raises(InvalidPrompt, match=message):
        engine.add_request("bad", prompt, SamplingParams())
    add(engine, "good")
    assert list(run(engine)) == ["good"]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [50]}, "stop_token_ids"),
        ({"allowed_token_ids": [3, 50]}, "allowed_token_ids"),
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"stop": ["x"]}, "stop"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"n": 257}, "n"),
        ({"best_of": 257}, "best_of"),
        ({"n": 30}, "n"),
    ],
)
def test_parameters_that_this_model_cannot_serve_are_refused_by_name(params, field):
    engine = make_engine()
    with pytest.raises(InvalidParameter, match=f"^{field} = "):
        engine.add_request("bad", {"prompt_token_ids": [1]}, SamplingParams(**params))
    assert not engine.has_unfinished_requests()


def test_parameters_changed_after_they_were_made_are_checked_again():
    engine, params = make_engine(), SamplingParams()
    params.top_p = 7
    with pytest.raises(InvalidParameter, match="top_p = 7"):
        engine.add_request("bad", {"prompt_token_ids": [1]}, params)
    with pytest.raises(InvalidParameter, match="sampling_params = None"):
        engine.add_request("bad", {"prompt_token_ids": [1]}, None)


def test_changing_the_parameters_of_a_queued_request_changes_nothing():
    engine, params = make_engine(), SamplingParams(max_tokens=3)
    engine.add_request("a", {"prompt_token_ids": [1]}, params)
    params.max_tokens = 1
    assert len(run(engine)["a"].outputs[0].token_ids) == 3


def test_a_request_id_serves_one_unfinished_request_at_a_time():
    engine = make_engine()
    add(engine, "a")
    with pytest.raises(InvalidParameter, match="request_id = 'a'"):
        add(engine, "a")
    with pytest.raises(InvalidParameter, match="request_id = 7"):
        add(engine, 7)
    run(engine)
    add(engine, "a")
    run(engine)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1.5}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"dtype": "int8"}, "dtype"),
        ({"seed": "x"}, "seed"),
        ({"skip_tokenizer_init": 1}, "skip_tokenizer_init"),
        ({"enable_chunked_prefill": None}, "enable_chunked_prefill"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching"),
        ({"preemption_mode": "swapping"}, "preemption_mode"),
        ({"preemption_mode": None}, "preemption_mode"),
        ({"swap_space": -1}, "swap_space"),
        ({"swap_space": float("inf")}, "swap_space"),
        ({"swap_space": "4"}, "swap_space"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"enforce_eager": 0}, "enforce_eager"),
        ({"model": 7}, "model"),
    ],
)
def test_engine_arguments_out_of_range_or_not_supported_are_refused_by_name(args, field):
    with pytest.raises(InvalidParameter, match=f"^{field} = "):
        EngineArgs(**args)


def test_a_step_must_have_room_for_a_token_of_every_sequence():
    with pytest.raises(InvalidParameter, match=r"max_num_batched_tokens = 8: must be at least max_num_seqs \(9\)"):
        make_engine(max_num_batched_tokens=8, max_num_seqs=9)
    with pytest.raises(InvalidParameter, match=r"must be at least max_model_len \(60\)"):
        make_engine(max_num_batched_tokens=59, max_num_seqs=9, enable_chunked_prefill=False)


def test_an_engine_argument_may_be_a_torch_dtype_by_its_printed_name():
    class PrintsAsTorch:
        def __str__(self):
            return "torch.bfloat16"

    assert EngineArgs(dtype=PrintsAsTorch()).dtype == "bfloat16"


class NoRepr:
    def __repr__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("value", [-(10**5000), NoRepr()], ids=["huge", "no repr"])
def test_a_value_that_cannot_be_printed_is_refused_all_the_same(value):
    with pytest.raises(InvalidParameter, match=f"block_size = <{type(value).__name__}>"):
        EngineArgs(block_size=value)


def test_an_error_survives_the_way_to_another_process():
    error = pickle.loads(pickle.dumps(InvalidInput("field", 7, "must be 8")))
    assert (str(error), error.field, error.value) == ("field = 7: must be 8", "field", 7)


@pytest.mark.parametrize("request_id", [5, None])
def test_only_names_can_be_aborted(request_id):
    with pytest.raises(InvalidParameter, match=f"request_id = {request_id}"):
        make_engine().abort_request(request_id)


def test_one_sample_more_than_the_pool_holds_is_fine_where_none_has_a_second_token():
    engine = make_engine(num_blocks=2)
    engine.add_request("a", {"prompt_token_ids": [1] * 6}, SamplingParams(n=4, max_tokens=1))
    assert len(run(engine)["a"].outputs) == 4
