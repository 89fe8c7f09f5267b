"""The engine over a shadow worker: requests in, outputs out, and what happens when something goes wrong in between."""

from __future__ import annotations

import pytest

from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.errors import InvariantBroken
from minipaged.sampling_params import SamplingParams
from tests.shadow_worker import ShadowWorker, shadow_logprob, solo_tokens


def make_engine(
    num_blocks=16, block_size=4, eos=(), max_model_len=60, policy=None, on_step=None, num_host_blocks=0, **args
):
    worker = ShadowWorker(num_blocks, block_size, eos=eos, max_model_len=max_model_len, num_host_blocks=num_host_blocks)
    args = EngineArgs(block_size=block_size, skip_tokenizer_init=True, **args)
    return LLMEngine(args, worker, policy=policy, on_step=on_step)


def add(engine, name, length=5, first=1, **params):
    prompt = tuple(range(first, first + length))
    params = SamplingParams(**{"max_tokens": 6, "seed": 3, **params})
    engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
    return prompt


def run(engine):
    """Step to the end; the finished output of each request, which must come once."""
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
    for pool in (engine.blocks, engine.scheduler.host):
        assert pool.num_free == pool.num_blocks
    return finished


def test_a_request_streams_its_tokens_and_reports_its_end_once():
    engine = make_engine()
    prompt = add(engine, "a")
    seen = [engine.step()[0].outputs[0].token_ids for _ in range(6)]
    expected = list(solo_tokens(prompt, 3, 6))
    assert seen == [expected[: i + 1] for i in range(6)]
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_requests_join_while_others_run():
    engine = make_engine()
    first = add(engine, "a", max_tokens=9)
    engine.step()
    second = add(engine, "b", length=7, first=20)
    done = run(engine)
    assert done["a"].outputs[0].token_ids == list(solo_tokens(first, 3, 9))
    assert done["b"].outputs[0].token_ids == list(solo_tokens(second, 3, 6))


def test_the_end_of_sequence_stops_unless_it_is_ignored():
    answer = solo_tokens((1, 2, 3, 4, 5), 3, 6)
    eos = answer[2]
    for ignore in (False, True):
        engine = make_engine(eos=(eos,))
        add(engine, "a", ignore_eos=ignore)
        [completion] = run(engine)["a"].outputs
        assert completion.token_ids == list(answer if ignore else answer[:3])
        assert (completion.finish_reason, completion.stop_reason) == (("length" if ignore else "stop"), None)


def test_a_stop_token_is_named_as_the_reason():
    answer = solo_tokens((1, 2, 3, 4, 5), 3, 6)
    engine = make_engine()
    add(engine, "a", stop_token_ids=[answer[1]])
    [completion] = run(engine)["a"].outputs
    assert (completion.token_ids, completion.finish_reason) == (list(answer[:2]), "stop")
    assert completion.stop_reason == answer[1]


def test_the_context_ends_an_answer_that_has_no_other_limit():
    engine = make_engine(max_model_len=12)
    add(engine, "a", max_tokens=None)
    [completion] = run(engine)["a"].outputs
    assert (len(completion.token_ids), completion.finish_reason) == (7, "length")


@pytest.mark.parametrize("budget", [2, 5, 100])
def test_prompt_logprobs_come_once_for_each_position_however_the_prompt_is_fed(budget):
    """Chunked, and put out and fed again: two requests in a pool for one and a half."""
    engine = make_engine(num_blocks=6, max_num_batched_tokens=budget, max_num_seqs=2)
    prompts = {name: add(engine, name, 7, first, prompt_logprobs=0) for name, first in (("a", 1), ("b", 11))}
    done = run(engine)
    for name, prompt in prompts.items():
        first, *rest = done[name].prompt_logprobs
        assert first is None
        assert [(token, entry.logprob) for position in rest for token, entry in position.items()] == [
            (token, shadow_logprob(prompt[:i])) for i, token in enumerate(prompt) if i > 0
        ]


def test_prompt_logprobs_survive_a_preemption():
    class PreemptOnce:
        def __init__(self):
            self.steps = 0

        def next_victim(self, running, must):
            self.steps += 1
            return running[-1] if self.steps in (3, 8) else None

    engine = make_engine(max_num_batched_tokens=3, max_num_seqs=1, policy=PreemptOnce())
    prompt = add(engine, "a", 9, prompt_logprobs=0, logprobs=0)
    output = run(engine)["a"]
    assert output.metrics.num_preemptions == 2
    assert len(output.prompt_logprobs) == 9
    assert output.outputs[0].token_ids == list(solo_tokens(prompt, 3, 6))
    assert len(output.outputs[0].logprobs) == 6
    assert output.outputs[0].cumulative_logprob == -6.0


def test_log_probabilities_are_given_only_when_asked_for():
    engine = make_engine()
    add(engine, "a")
    output = run(engine)["a"]
    assert (output.prompt_logprobs, output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None,) * 3


def test_a_request_without_a_seed_gets_one_from_the_engine_and_its_number():
    def tokens(engine_seed, number):
        engine = make_engine(seed=engine_seed)
        for i in range(number + 1):
            add(engine, f"r{i}", seed=None)
        return run(engine)[f"r{number}"].outputs[0].token_ids

    assert tokens(0, 0) == tokens(0, 0)
    assert len({tuple(tokens(seed, number)) for seed in (0, 1) for number in (0, 1)}) == 4


# -------------------------------------------------------------------- ends from outside


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_is_reported_once_with_what_there_was_and_harms_nobody(steps):
    engine = make_engine()
    gone, stays = add(engine, "gone"), add(engine, "stays", first=9)
    for _ in range(steps):
        engine.step()
    engine.abort_request(["gone", "unknown"])
    assert engine.blocks.num_free >= engine.blocks.num_blocks - 3
    done = run(engine)
    assert (done["gone"].outputs[0].finish_reason, done["stays"].outputs[0].finish_reason) == ("abort", "length")
    assert done["gone"].outputs[0].token_ids == list(solo_tokens(gone, 3, 6)[:steps])
    assert done["stays"].outputs[0].token_ids == list(solo_tokens(stays, 3, 6))
    engine.abort_request("gone")
    assert not engine.has_unfinished_requests()


def test_a_step_that_fails_ends_its_requests_and_leaves_the_engine_usable():
    engine = make_engine(max_num_seqs=2)
    for name in ("a", "b", "c"):
        add(engine, name, first=2)
    engine.step()
    execute, cause = engine.worker.execute, RuntimeError("no memory")
    engine.worker.execute = lambda plan: (_ for _ in ()).throw(cause)
    failed = {output.request_id: output for output in engine.step()}
    engine.worker.execute = execute
    assert set(failed) == {"a", "b"}
    for output in failed.values():
        assert (output.finished, output.outputs[0].finish_reason, output.error) == (True, "error", cause)
        assert len(output.outputs[0].token_ids) == 1
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert run(engine)["c"].outputs[0].token_ids == list(solo_tokens((2, 3, 4, 5, 6), 3, 6))


def test_an_interrupt_inside_a_step_is_raised_and_frees_the_step_s_requests():
    engine = make_engine()
    add(engine, "a")
    engine.step()
    execute = engine.worker.execute
    engine.worker.execute = lambda plan: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.worker.execute = execute
    assert run(engine)["a"].outputs[0].finish_reason == "error"


def test_an_answer_that_outgrows_the_whole_pool_ends_with_length_and_keeps_its_tokens():
    engine = make_engine(num_blocks=3)
    prompt = add(engine, "a", max_tokens=40)
    [completion] = run(engine)["a"].outputs
    assert completion.finish_reason == "length"
    assert completion.token_ids == list(solo_tokens(prompt, 3, 8))


def test_metrics_are_moments_in_order():
    engine = make_engine()
    add(engine, "a")
    metrics = run(engine)["a"].metrics
    moments = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert moments == sorted(moments)


def test_an_id_that_is_used_again_after_an_abort_reports_both():
    engine = make_engine()
    add(engine, "a")
    engine.abort_request("a")
    add(engine, "a")
    reasons = []
    while engine.has_unfinished_requests():
        reasons += [output.outputs[0].finish_reason for output in engine.step() if output.finished]
    assert reasons == ["abort", "length"]


def test_a_request_that_takes_the_name_of_one_aborted_in_this_step_gets_no_token_of_it():
    def on_step(plan, result, snapshot):
        if snapshot.step == 1:
            engine.abort_request("a")
            add(engine, "a", first=20)

    engine = make_engine(on_step=on_step)
    add(engine, "a")
    last = None
    while engine.has_unfinished_requests():
        last = engine.step()[-1]
    assert last.outputs[0].token_ids == list(solo_tokens(tuple(range(20, 25)), 3, 6))


def test_the_first_token_s_time_stays():
    engine = make_engine()
    add(engine, "a")
    times = {engine.step()[0].metrics.first_token_time for _ in range(4)}
    assert len(times) == 1


def test_without_chunking_no_plan_holds_a_part_of_a_prompt():
    plans = []
    engine = make_engine(
        enable_chunked_prefill=False,
        max_num_batched_tokens=60,
        max_num_seqs=4,
        on_step=lambda plan, *_: plans.append(plan),
    )
    for i in range(3):
        add(engine, str(i), 35, first=i)
    run(engine)
    assert {len(row.token_ids) for plan in plans for row in plan.work} == {35, 1}


def test_a_policy_that_names_nobody_when_somebody_must_go_is_named():
    class Nobody:
        def next_victim(self, running, must):
            return None

        def __repr__(self):
            return "Nobody()"

    engine = make_engine(num_blocks=4, policy=Nobody())
    add(engine, "a", 7, max_tokens=20)
    add(engine, "b", 7, max_tokens=20)
    with pytest.raises(InvariantBroken, match=r"Nobody\(\) names no victim"):
        run(engine)
