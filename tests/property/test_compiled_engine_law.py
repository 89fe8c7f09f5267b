"""The engine law with a compiled model, in one shape: what varies is all that one graph must serve."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.preempt_at_random import PreemptAtRandom
from tests.property.test_engine_law import TOKENIZER, assert_same, requests, run, solo_engine
from tests.tiny_engine import make_engine
from tests.tiny_llama import tiny_llama

NUM_BLOCKS = 28  # three sequences of 20 + 14 tokens in blocks of 4, and one block


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield tiny_llama("gqa").save(tmp_path_factory.mktemp("gqa"))
    torch._dynamo.reset()


@pytest.mark.slow
@given(
    requests=requests,
    budget=st.integers(5, 40),
    preempt=st.sampled_from([0.0, 0.1, 0.5]),
    caching=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100)
def test_a_request_gets_from_a_compiled_model_what_it_gets_alone_in_eager_mode(
    directory, requests, budget, preempt, caching, seed
):
    engine = make_engine(
        directory,
        NUM_BLOCKS,
        PreemptAtRandom(seed, preempt),
        random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS),
        tokenizer=TOKENIZER,
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        enforce_eager=False,
        enable_prefix_caching=caching,
    )
    solo = [run(solo_engine(directory), [request])[0] for request in requests]
    assert_same(run(engine, requests), solo)
