"""LLM over a tiny real model: lists of prompts, other users of the engine, interrupts, threads, pins."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.engine.interrupt import Interruptible, deferred_interrupt
from minipaged.errors import InvalidParameter, InvalidPrompt
from minipaged.scheduling.preemption import PreemptLatest
from tests.tiny_llama import random_prompt, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=5)
PROMPTS = [{"prompt_token_ids": random_prompt(length, seed=length)} for length in (5, 9, 3)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama("gqa").save(tmp_path_factory.mktemp("gqa"))


@pytest.fixture
def llm(directory):
    return make_llm(directory)


def make_llm(directory, **args):
    return LLM(directory, skip_tokenizer_init=True, num_gpu_blocks_override=64, **args)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_own_parameters(llm):
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert tokens(llm.generate(PROMPTS, GREEDY)) == tokens(alone)
    lengths = [2, 7, 4]
    outputs = llm.generate(PROMPTS, [SamplingParams(temperature=0, max_tokens=n) for n in lengths])
    assert [len(ids) for ids in tokens(outputs)] == lengths
    assert llm.generate([], GREEDY) == []


def test_every_prompt_is_checked_before_any_is_queued(llm):
    with pytest.raises(InvalidPrompt, match=r"from 0 to 60 \(request 1 of 2\)"):
        llm.generate([PROMPTS[0], {"prompt_token_ids": [99]}], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(InvalidParameter, match="as many as there are prompts"):
        llm.generate(PROMPTS, [GREEDY])
    with pytest.raises(InvalidPrompt, match="prompts = 7"):
        llm.generate(7, GREEDY)


def test_whoever_uses_the_engine_beside_generate_is_told_of_its_requests(llm):
    llm.llm_engine.add_request("mine", PROMPTS[1], SamplingParams(max_tokens=1))
    llm.generate(PROMPTS[:1], GREEDY)
    reported = []
    while llm.llm_engine.has_unfinished_requests():
        reported += [output.request_id for output in llm.llm_engine.step() if output.finished]
    assert reported == ["mine"]


@pytest.mark.parametrize("step", [0, 2, 4])
def test_ctrl_c_ends_the_call_between_two_steps_and_leaves_the_engine_usable(directory, step):
    def interrupt(plan, result, snapshot):
        if snapshot.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    llm = make_llm(directory, on_step=interrupt)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert signal.getsignal(signal.SIGINT) is handler
    assert llm.llm_engine.blocks.num_free == 64
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate(PROMPTS, GREEDY)) == 3


def test_a_second_ctrl_c_inside_a_step_leaves_nothing_to_report(llm):
    engine = llm.llm_engine
    execute = engine.worker.execute

    def interrupted(plan):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    engine.worker.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    engine.worker.execute = execute
    assert not engine.has_unfinished_requests()


def test_ctrl_c_while_requests_are_added_leaves_none_behind(llm, monkeypatch):
    engine = llm.llm_engine
    add_request = engine.add_request

    def interrupted(name, *request):
        add_request(name, *request)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "add_request", interrupted)
        llm.generate(PROMPTS, GREEDY)
    assert not engine.has_unfinished_requests()


def test_a_second_ctrl_c_amid_planning_waits_until_nothing_can_be_lost(directory):
    class Impatient:
        def next_victim(self, running, must):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    llm = make_llm(directory, policy=Impatient())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    llm.llm_engine.scheduler.check()
    counts = llm.get_metrics().counts
    assert (counts.num_steps, llm.llm_engine.blocks.num_free) == (2, 64)


def test_a_second_ctrl_c_does_not_wait_for_the_worker_nor_a_third_one_for_anything():
    def press(times):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), deferred_interrupt(Interruptible()) as flag:
        press(2)
        assert flag.is_set
        press(1)
        raise AssertionError("never reached")
    worker = Interruptible()
    with pytest.raises(KeyboardInterrupt), deferred_interrupt(worker), worker:
        press(2)
        raise AssertionError("never reached")
    assert not worker.is_now


def test_calls_from_several_threads_take_turns(llm):
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: tokens(llm.generate(PROMPTS, GREEDY))}), daemon=True)
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == dict.fromkeys(range(3), expected)


def test_beam_search_returns_prompt_and_continuation_best_first(llm):
    [output] = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=3, max_tokens=4))
    assert len(output.sequences) == 3
    assert all(len(sequence.tokens) == 9 for sequence in output.sequences)
    assert all(sequence.tokens[:5] == PROMPTS[0]["prompt_token_ids"] for sequence in output.sequences)
    scores = [sequence.cum_logprob for sequence in output.sequences]
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(InvalidParameter, match="must be BeamSearchParams"):
        llm.beam_search(PROMPTS, GREEDY)


def test_a_pinned_prefix_stays_until_it_is_released(directory):
    llm = make_llm(directory, enable_prefix_caching=True, block_size=4)
    system = random_prompt(18, seed=1)
    flood = [{"prompt_token_ids": random_prompt(60, seed=seed)} for seed in range(8)]
    ask = {"prompt_token_ids": [*system, 5, 6]}
    uncached = tokens(make_llm(directory).generate([ask], GREEDY))
    with llm.pin_prefix({"prompt_token_ids": system}) as pinned:
        assert len(pinned.blocks) == 4
        llm.generate(flood, GREEDY)
        [output] = llm.generate([ask], GREEDY)
        assert output.num_cached_tokens == 16
        assert tokens([output]) == uncached
    llm.generate(flood, GREEDY)
    assert llm.generate([ask], GREEDY)[0].num_cached_tokens == 0
    assert llm.reset_prefix_cache()
    assert llm.llm_engine.blocks.num_free == 64
    with pytest.raises(InvalidParameter, match="enable_prefix_caching = False"):
        make_llm(directory).pin_prefix(ask)


def test_a_pin_that_other_pins_leave_no_room_for_is_refused(directory):
    llm = LLM(directory, skip_tokenizer_init=True, num_gpu_blocks_override=4, enable_prefix_caching=True, block_size=4)
    first = llm.pin_prefix({"prompt_token_ids": random_prompt(12, seed=1)})
    with pytest.raises(InvalidPrompt, match="does not fit into the KV blocks that other pins leave"):
        llm.pin_prefix({"prompt_token_ids": random_prompt(8, seed=2)})
    first.release()
    assert len(llm.pin_prefix({"prompt_token_ids": random_prompt(8, seed=2)}).blocks) == 2


def test_a_hook_may_reset_the_cache_but_not_generate(directory):
    llm = make_llm(directory, enable_prefix_caching=True)
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    llm.llm_engine.on_step = lambda *_: llm.reset_prefix_cache()
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    llm.llm_engine.on_step = lambda *_: llm.generate(PROMPTS, GREEDY)
    with pytest.raises(InvalidParameter, match="on_step = .* must not step the engine"):
        llm.generate(PROMPTS, GREEDY)
    llm.llm_engine.on_step = None
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"attention_backend": []}, r"attention_backend = \[\]"),
        ({"attention_backend": "flash"}, "attention_backend = 'flash'"),
        ({"device": "cpu:7"}, "device = 'cpu:7'"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"max_model_len": 257}, "max_model_len = 257: the model's positions end at 256"),
        ({"num_gpu_blocks_override": 10**14}, "do not fit into memory"),
        ({"num_gpu_blocks_override": 10**30}, "do not fit into memory"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes = 1000: leaves 1000 bytes; one block takes 8192"),
        ({"enable_prefix_caching": [1]}, r"enable_prefix_caching = \[1\]"),
        ({"swap_space": [1]}, r"swap_space = \[1\]"),
        ({"blocksize": 16}, "blocksize = 16: EngineArgs has no such option; did you mean block_size?"),
        ({"trust_remote_code": True}, "trust_remote_code = True: EngineArgs has no such option"),
        ({"policy": "fcfs"}, "policy = 'fcfs': must be an object with the method next_victim"),
        ({"policy": PreemptLatest}, "must be an object with the method next_victim"),
        ({"on_step": 3}, "on_step = 3: must be a function"),
        ({"enable_prefix_caching": True, "eviction_policy": "lru"}, "must be an object with the methods release"),
        ({"tensor_parallel_size": 2, "enforce_eager": False}, "enforce_eager = False: must be True with several ranks"),
        ({"swap_space": 1e6}, "swap_space = 1000000.0: this machine has .* GiB of memory"),
        ({"swap_space": 1e300}, r"swap_space = 1e\+300: this machine has"),
    ],
)
def test_what_cannot_be_built_is_refused(directory, args, message):
    with pytest.raises(InvalidParameter, match=message):
        LLM(directory, skip_tokenizer_init=True, **args)
