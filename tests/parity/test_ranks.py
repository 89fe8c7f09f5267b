"""Tensor parallelism: several ranks give the tokens of one, under whatever the scheduler does (the engine law).

Ranks are threads here (tests/thread_ranks.py): the same workers, messages and split layers, without the processes.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged import BeamSearchParams, SamplingParams
from minipaged.engine_args import EngineArgs
from minipaged.worker.parallel_worker import HeldBytes
from minipaged.worker.worker import Worker
from tests.property.preempt_at_random import PreemptAtRandom
from tests.property.test_engine_law import TOKENIZER, assert_same, most_blocks, requests, run, solo_engine
from tests.thread_ranks import all_ranks, in_threads, make_parallel_engine
from tests.tiny_engine import make_engine
from tests.tiny_llama import random_prompt, tiny_llama

NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 36}  # SmolLM2's
MODELS = {
    "4 heads, 4 KV heads": tiny_llama("mha"),
    "4 heads, 2 KV heads": tiny_llama("gqa"),
    "4 heads, 1 KV head": tiny_llama("mqa"),
    "9 heads, 3 KV heads": tiny_llama("gqa", **NINE_HEADS),
    "9 heads, 1 KV head": tiny_llama("gqa", **{**NINE_HEADS, "num_key_value_heads": 1}),
}
SPLITS = [
    ("4 heads, 4 KV heads", 2),
    ("4 heads, 4 KV heads", 4),
    ("4 heads, 2 KV heads", 2),
    ("4 heads, 2 KV heads", 4),  # two ranks hold each KV head
    ("4 heads, 1 KV head", 2),
    ("9 heads, 3 KV heads", 3),
    ("9 heads, 1 KV head", 3),
]
GREEDY = {"temperature": 0, "max_tokens": 14, "ignore_eos": True}
REQUESTS = [
    (random_prompt(19, 0), SamplingParams(**GREEDY, logprobs=2)),
    (random_prompt(25, 0), SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)),  # forks
    (random_prompt(11, 1), BeamSearchParams(beam_width=3, max_tokens=10)),
    (random_prompt(17, 2), SamplingParams(**GREEDY, prompt_logprobs=1)),
    (random_prompt(19, 0), SamplingParams(seed=9, max_tokens=14, repetition_penalty=1.3)),  # begins as the first
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {name: tiny.save(tmp_path_factory.mktemp("tiny")) for name, tiny in MODELS.items()}


@pytest.fixture(scope="module")
def alone(directories):
    """What each model's requests get one by one, from one rank, in a large pool."""
    cache = {}

    def outputs(name):
        if name not in cache:
            engine = make_engine(directories[name], num_blocks=200)
            cache[name] = [run(engine, [request])[0] for request in REQUESTS]
        return cache[name]

    return outputs


def parallel_engine(directory, size, **changes):
    """A small pool, chunks, a prefix cache, and a quarter of all steps put somebody out."""
    args = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16, "seed": 0}
    args |= {"enable_prefix_caching": True, "policy": PreemptAtRandom(1, 0.25)}
    args |= {"free_order": random.Random(1).sample(range(40), 40)} | changes
    return make_parallel_engine(directory, size, **args)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("name", "size"), SPLITS)
def test_ranks_give_the_tokens_of_one_under_everything_at_once(directories, alone, name, size, mode):
    """Swap or recompute, fork and copy-on-write, beams, chunks, the prefix cache, penalties, scored prompts."""
    engine, _ = parallel_engine(directories[name], size, preemption_mode=mode, num_host_blocks=40)
    seen = Seen()
    engine.on_step = seen
    assert_same(run(engine, REQUESTS), alone(name))
    assert seen.preempted and seen.copies and seen.hits and seen.chunks
    assert bool(seen.swaps) == (mode == "swap")


@pytest.mark.slow
@given(
    split=st.sampled_from(SPLITS), requests=requests, preempt=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 2**32)
)
@settings(max_examples=150)
def test_ranks_give_the_tokens_of_one_whatever_is_asked(directories, split, requests, preempt, seed):
    name, size = split
    engine, _ = parallel_engine(
        directories[name],
        size,
        num_blocks=most_blocks(directories[name], requests, 4) + 2,
        num_host_blocks=8,
        policy=PreemptAtRandom(seed, preempt),
        free_order=None,
        tokenizer=TOKENIZER,
    )
    solo = [run(solo_engine(directories[name]), [request])[0] for request in requests]
    assert_same(run(engine, requests), solo)


class Seen:
    """What the steps had in them: the test would show nothing without it."""

    def __init__(self) -> None:
        self.preempted = self.swaps = self.copies = self.hits = self.chunks = 0

    def __call__(self, plan, result, snapshot) -> None:
        self.preempted += len(snapshot.preempted)
        self.swaps += len(plan.swap_out)
        self.copies += len(plan.copies)
        self.hits += sum(event.kind == "hit" for event in snapshot.events)
        answered = {entry.row for entry in plan.sampling}
        self.chunks += sum(len(row.token_ids) > 1 for i, row in enumerate(plan.work) if i not in answered)


@pytest.mark.parametrize("backend", ["gather", "reference"])
def test_each_request_alone_in_a_large_pool_is_the_same_too(directories, alone, backend):
    name = "4 heads, 2 KV heads"
    engine, _ = make_parallel_engine(directories[name], 2, num_blocks=200, attention_backend=backend)
    assert_same([run(engine, [request])[0] for request in REQUESTS], alone(name))


@pytest.mark.parametrize(("name", "size"), SPLITS)
def test_every_rank_stores_its_own_heads_in_the_blocks_that_one_rank_would_use(directories, name, size):
    """Equal block numbers, and a share of the bytes: the pools of the ranks side by side are the pool of one."""
    single = make_engine(directories[name], num_blocks=40, block_size=4)
    engine, workers = make_parallel_engine(directories[name], size, num_blocks=40, block_size=4)
    for each in (single, engine):
        run(each, REQUESTS)
    num_kv_heads = MODELS[name].config.num_kv_heads
    copies = max(1, size // num_kv_heads)
    for layer, whole in enumerate(single.worker.cache.layers):
        for part in ("key", "value"):
            own = [getattr(worker.cache.layers[layer], part) for worker in workers]
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in own)
            side_by_side = torch.cat(own[::copies], dim=2)  # neighbours that hold the same head count once
            torch.testing.assert_close(side_by_side, getattr(whole, part), rtol=0, atol=1e-9, equal_nan=True)
    whole_bytes = single.worker.cache.num_bytes
    assert [worker.cache.num_bytes for worker in workers] == [whole_bytes * copies // size] * size
    assert [held.kv for held in workers[0].held_bytes] == [whole_bytes * copies // size] * size
    assert isinstance(workers[0].held_bytes[0], HeldBytes)


def test_the_pool_of_every_rank_is_as_large_as_the_smallest_one(directories):
    def load(own):
        args = EngineArgs(model=directories["4 heads, 4 KV heads"], num_gpu_blocks_override=20 - own.rank)
        worker = Worker(args, own)
        worker.load(64)
        return worker.num_blocks

    assert in_threads(all_ranks(4), load) == [17] * 4


def test_the_other_ranks_apply_the_very_blocks_of_rank_0_s_plans(directories):
    engine, workers = parallel_engine(directories["9 heads, 3 KV heads"], 3)
    planned, applied = [], {1: [], 2: []}
    engine.on_step = lambda plan, result, snapshot: planned.append((plan.work, plan.copies)) if plan.work else None
    for rank in applied:
        forward = workers[rank].forward

        def spy(plan, rank=rank, forward=forward):
            applied[rank].append((plan.work, plan.copies))
            return forward(plan)

        workers[rank].forward = spy
    run(engine, REQUESTS)
    assert len(planned) > 20
    assert applied[1] == applied[2] == planned
