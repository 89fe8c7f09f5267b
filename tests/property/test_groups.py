"""The engine law for groups, on a shadow worker: n samples, early ends, any pool, any preemption, any chunking."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from minipaged.blocks.block_table import blocks_for
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.sampling_params import SamplingParams
from tests.property.preempt_at_random import PreemptAtRandom
from tests.shadow_worker import ShadowWorker, shadow_logprob, solo_tokens

requests = st.lists(
    st.fixed_dictionaries(
        {
            "length": st.integers(1, 20),
            "n": st.integers(1, 4),
            "max_tokens": st.integers(1, 12),
            "seed": st.integers(0, 1000),
            "stops": st.lists(st.integers(0, 19), max_size=4),
            "scored": st.booleans(),
        }
    ),
    min_size=1,
    max_size=5,
)


def expected_tokens(prompt, seed, request):
    tokens = solo_tokens(prompt, seed, request["max_tokens"], vocab_size=20)
    ends = [i for i, token in enumerate(tokens) if token in request["stops"]]
    return list(tokens[: ends[0] + 1] if ends else tokens)


@given(
    requests=requests,
    block_size=st.integers(1, 6),
    spare_blocks=st.integers(0, 6),
    budget=st.integers(8, 30),
    preempt=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 2**32),
)
def test_each_sample_gets_what_it_gets_alone(requests, block_size, spare_blocks, budget, preempt, seed):
    def most_blocks(request):
        shared = request["length"] // block_size
        return shared + request["n"] * (blocks_for(request["length"] + request["max_tokens"], block_size) - shared)

    num_blocks = max(map(most_blocks, requests)) + spare_blocks
    args = EngineArgs(block_size=block_size, skip_tokenizer_init=True, max_num_seqs=8, max_num_batched_tokens=budget)
    worker = ShadowWorker(num_blocks, block_size, vocab_size=20)
    order = random.Random(seed).sample(range(num_blocks), num_blocks)
    engine = LLMEngine(args, worker, policy=PreemptAtRandom(seed, preempt), free_order=order)
    prompts = [tuple((i * 7 + j) % 20 for j in range(request["length"])) for i, request in enumerate(requests)]
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        params = SamplingParams(
            n=request["n"],
            max_tokens=request["max_tokens"],
            seed=request["seed"],
            stop_token_ids=request["stops"],
            prompt_logprobs=0 if request["scored"] else None,
        )
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    done, steps = {}, 0
    while engine.has_unfinished_requests():
        done.update((int(output.request_id), output) for output in engine.step() if output.finished)
        engine.scheduler.check()
        steps += 1
        assert steps < 5000
    assert engine.blocks.num_free == num_blocks
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        assert [output.token_ids for output in done[i].outputs] == [
            expected_tokens(prompt, request["seed"] + j, request) for j in range(request["n"])
        ]
        if request["scored"]:
            scores = [entry.logprob for position in done[i].prompt_logprobs[1:] for entry in position.values()]
            assert scores == [shadow_logprob(prompt[:k]) for k in range(1, len(prompt))]
