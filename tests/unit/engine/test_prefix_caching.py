"""Prefix caching in a whole engine, over a shadow worker: what is computed, what is not, and what must not go wrong."""

from __future__ import annotations

import pytest

from minipaged.blocks.eviction import EvictFewestHits
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from tests.shadow_worker import ShadowWorker, shadow_logprob, solo_tokens
from tests.unit.engine.test_llm_engine import add, make_engine, run


def make(num_blocks=64, **kwargs):
    """An engine with a prefix cache, and the plans that it makes."""
    plans = []
    engine = make_engine(
        num_blocks=num_blocks, enable_prefix_caching=True, on_step=lambda plan, *_: plans.append(plan), **kwargs
    )
    return engine, plans


@pytest.mark.parametrize("length", [3, 4, 5, 12])
@pytest.mark.parametrize("how", ["one after the other", "in one batch", "after an eviction"])
def test_the_same_prompt_twice_gives_the_same_tokens_and_less_work(length, how):
    engine, plans = make(num_blocks=10)
    prompt = add(engine, "a", length)
    if how == "one after the other":
        done = run(engine)
        add(engine, "b", length)
        done |= run(engine)
    elif how == "in one batch":
        add(engine, "b", length)
        done = run(engine)
    else:
        done = run(engine)
        add(engine, "flood", 36, first=13, max_tokens=3)
        run(engine)
        add(engine, "b", length)
        done |= run(engine)
    expected = list(solo_tokens(prompt, 3, 6))
    assert [done[name].outputs[0].token_ids for name in "ab"] == [expected, expected]
    assert done["a"].num_cached_tokens == 0
    assert done["b"].num_cached_tokens == (0 if how == "after an eviction" else (length - 1) // 4 * 4)


def test_many_requests_with_one_system_prompt_compute_it_once_even_in_the_same_step():
    engine, plans = make(num_blocks=200)
    system = list(range(1, 41))
    for i in range(8):
        engine.add_request(str(i), {"prompt_token_ids": [*system, i, i]}, SamplingParams(max_tokens=2, seed=0))
    done = run(engine)
    assert plans[0].num_tokens == 40 + 8 * 2
    assert [done[str(i)].num_cached_tokens for i in range(8)] == [0] + [40] * 7
    for i in range(8):
        assert done[str(i)].outputs[0].token_ids == list(solo_tokens((*system, i, i), 0, 2))


def test_what_was_generated_is_cached_too():
    engine, plans = make()
    prompt = add(engine, "first", 8)
    answer = run(engine)["first"].outputs[0].token_ids
    engine.add_request("next", {"prompt_token_ids": [*prompt, *answer, 7, 7]}, SamplingParams(max_tokens=1, seed=0))
    assert run(engine)["next"].num_cached_tokens == 12  # of 13 computed ones, in whole blocks


def test_a_request_whose_prompt_is_scored_reads_no_cache_and_fills_it():
    engine, plans = make()
    add(engine, "a", 9)
    run(engine)
    prompt = add(engine, "scored", 9, prompt_logprobs=0)
    output = run(engine)["scored"]
    assert output.num_cached_tokens == 0
    scores = [entry.logprob for position in output.prompt_logprobs[1:] for entry in position.values()]
    assert scores == [shadow_logprob(prompt[:k]) for k in range(1, 9)]


def test_a_step_that_fails_takes_its_readers_with_it_and_leaves_nothing_to_hit():
    engine, plans = make()
    execute = engine.worker.execute
    for name in ("writer", "reader"):
        add(engine, name, 9)
    engine.worker.execute = lambda plan: (_ for _ in ()).throw(RuntimeError("no memory"))
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["error", "error"]
    engine.worker.execute = execute
    assert engine.blocks.allocator.cached == []
    prompt = add(engine, "again", 9)
    output = run(engine)["again"]
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (0, list(solo_tokens(prompt, 3, 6)))


def test_a_step_that_fails_when_it_is_done_again_leaves_nothing_to_hit_either():
    """The first time the viewer raises, after the blocks were computed; the second time they are overwritten half."""

    def on_step(plan, result, snapshot):
        raise ZeroDivisionError

    engine = make_engine(num_blocks=64, enable_prefix_caching=True, on_step=on_step)
    add(engine, "a", 9)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.on_step, execute = None, engine.worker.execute
    engine.worker.execute = lambda plan: (_ for _ in ()).throw(RuntimeError("no memory"))
    engine.step()
    engine.worker.execute = execute
    add(engine, "b", 9)
    assert run(engine)["b"].num_cached_tokens == 0


def test_samples_of_a_cached_prompt_share_it():
    engine, plans = make()
    add(engine, "a", 9)
    run(engine)
    prompt = add(engine, "b", 9, n=3)
    outputs = run(engine)["b"].outputs
    assert [output.token_ids for output in outputs] == [list(solo_tokens(prompt, 3 + i, 6)) for i in range(3)]
    assert sum(len(plan.copies) for plan in plans) == 2


def test_a_prompt_that_fits_only_because_nobody_pins_is_ended_and_not_kept_waiting():
    engine, plans = make(num_blocks=4)
    add(engine, "a", 9, max_tokens=1)
    run(engine)
    pinned = engine.prefixes.pin(range(1, 9), "")
    add(engine, "b", 15, first=30, max_tokens=1)
    done = {output.request_id: output for output in engine.step()}
    assert done["b"].outputs[0].finish_reason == "length"
    engine.prefixes.unpin(pinned)
    add(engine, "c", 15, first=30, max_tokens=1)
    assert len(run(engine)["c"].outputs[0].token_ids) == 1


def interrupt_next_plan(engine):
    """Ctrl-C while the next step is planned, its blocks taken and made known, nothing computed."""
    admit = engine.scheduler._admission.admit

    def interrupted(builder):
        engine.scheduler._admission.admit = admit
        admit(builder)
        raise KeyboardInterrupt

    engine.scheduler._admission.admit = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_an_interrupt_while_a_step_is_planned_leaves_nothing_to_hit():
    engine, plans = make()
    prompt = add(engine, "a", 9)
    interrupt_next_plan(engine)
    engine.abort_request("a")
    add(engine, "b", 9)
    output = run(engine)["b"]
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (0, list(solo_tokens(prompt, 3, 6)))


def test_copies_of_a_plan_that_was_interrupted_are_not_lost():
    """The second step forks the prompt's last block; its plan, copies included, never reaches the worker."""
    engine, plans = make()
    prompt = add(engine, "a", 9, n=3)
    engine.step()
    interrupt_next_plan(engine)
    outputs = run(engine)["a"].outputs
    assert [output.token_ids for output in outputs] == [list(solo_tokens(prompt, 3 + i, 6)) for i in range(3)]


@pytest.mark.parametrize(
    ("policy", "caching", "message"),
    [
        (EvictFewestHits(), False, "needs enable_prefix_caching = True"),
        (EvictFewestHits, True, "must be a new object"),
    ],
)
def test_an_eviction_policy_that_could_do_nothing_is_refused(policy, caching, message):
    args = EngineArgs(block_size=4, skip_tokenizer_init=True, enable_prefix_caching=caching)
    with pytest.raises(InvalidParameter, match=f"eviction_policy = .*{message}"):
        LLMEngine(args, ShadowWorker(8, 4), eviction_policy=policy)


def test_an_eviction_policy_that_keeps_another_engine_s_blocks_is_refused():
    args = EngineArgs(block_size=4, skip_tokenizer_init=True, enable_prefix_caching=True)
    policy = EvictFewestHits()
    engine = LLMEngine(args, ShadowWorker(8, 4), eviction_policy=policy)
    add(engine, "a", 9)
    run(engine)
    with pytest.raises(InvalidParameter, match="each engine needs one of its own"):
        LLMEngine(args, ShadowWorker(8, 4), eviction_policy=policy)
