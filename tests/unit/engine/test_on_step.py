"""The hook that sees every step: it may abort, it may raise, and it hears of every event once."""

from __future__ import annotations

from tests.shadow_worker import solo_tokens
from tests.unit.engine.test_llm_engine import add, make_engine, run


def test_an_abort_from_the_step_hook_is_honoured():
    def on_step(plan, result, snapshot):
        if snapshot.step == 2:
            engine.abort_request("a")

    engine = make_engine(on_step=on_step)
    add(engine, "a")
    [completion] = run(engine)["a"].outputs
    assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 2)


def test_a_hook_that_raises_loses_no_token():
    """The step is planned again, with a request that came in between, and computes the same."""

    def on_step(plan, result, snapshot):
        if snapshot.step in (1, 2, 4):
            raise ZeroDivisionError

    engine = make_engine(on_step=on_step)
    prompt = add(engine, "a")
    failures, done = 0, {}
    while engine.has_unfinished_requests():
        try:
            done.update((output.request_id, output) for output in engine.step())
        except ZeroDivisionError:
            failures += 1
            add(engine, f"late {failures}", first=20)
    assert failures == 3
    assert done["a"].outputs[0].token_ids == list(solo_tokens(prompt, 3, 6))
    assert all(output.finished for output in done.values())
    assert len(done) == 4


def test_every_event_is_in_exactly_one_snapshot():
    events = []
    engine = make_engine(on_step=lambda plan, result, snapshot: events.extend(snapshot.events))
    add(engine, "a", n=2, max_tokens=3)
    add(engine, "b", max_tokens=6)
    run(engine)
    kinds = [event.kind for event in events]
    assert kinds.count("fork") == 1
    assert kinds.count("copy") == 1
    assert kinds.count("free") == 2  # the third comes after the last step
    assert events[0] == ("allocate", 0, (0, 1))


def test_without_a_viewer_events_do_not_pile_up():
    engine = make_engine()
    add(engine, "a")
    for _ in range(3):
        engine.step()
        assert engine.blocks.events == []
