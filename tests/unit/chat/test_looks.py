"""Commands that look at the engine, and questions beside the conversation."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from minipaged.chat.commands import run_command
from minipaged.errors import InvalidParameter
from tests.unit.chat.test_chat import make_session, said

pytestmark = pytest.mark.real_model


def printed(session):
    return session.out.file.getvalue()


@pytest.mark.parametrize("command", ["/stats", "/why"])
def test_before_any_answer_there_is_nothing_to_look_at(session, command):
    run_command(session, command)
    assert said(session) == "(nothing has been answered yet)\n"


def test_why_tells_what_a_turn_reused_and_that_nobody_was_preempted(session):
    session.answer("Hello there")
    run_command(session, "/why")
    assert "reused: nothing of" in said(session)
    assert "preempted: never" in said(session)
    session.answer("And again")
    run_command(session, "/why")
    cached = session.last.num_cached_tokens
    assert cached > 0
    assert f"reused: {cached} of {len(session.last.prompt_token_ids)} prompt tokens, in {cached // 4} full" in said(
        session
    )


def test_n_shows_several_answers_from_one_prompt_and_leaves_the_conversation_alone(session):
    session.answer("Hello")
    before = list(session.conversation.messages)
    run_command(session, "/n 3 Who are you?")
    assert session.conversation.messages == before
    assert len(session.last.outputs) == 3
    assert all(f"answer {i}" in printed(session) for i in (1, 2, 3))
    run_command(session, "/why")
    copies = 2 if len(session.last.prompt_token_ids) % 4 else 0  # of the prompt's partial block, for all but one
    assert f"copied: {copies} blocks" in said(session)


def test_the_first_of_n_answers_is_the_one_that_the_conversation_would_have_got(session, tokenizer):
    run_command(session, "/n 2 Who are you?")
    other = make_session(tokenizer)
    other.answer("Who are you?")
    assert session.last.outputs[0].token_ids == other.last.outputs[0].token_ids


def test_beam_shows_the_best_answers_with_their_log_probabilities(session):
    run_command(session, "/beam 2 Who are you?")
    best, second = session.last.outputs
    assert best.cumulative_logprob >= second.cumulative_logprob
    assert f"log-probability {best.cumulative_logprob:.2f}" in printed(session)
    assert session.conversation.messages == []


def test_in_a_narrow_console_the_answers_stand_one_below_the_other(session):
    session.out = Console(file=io.StringIO(), width=60)
    run_command(session, "/n 3 Who are you?")
    assert [f"answer {i}:" in said(session) for i in (1, 2, 3)] == [True] * 3


def test_blocks_shows_the_pool_between_two_answers(session):
    run_command(session, "/blocks")
    assert "0 of 60 blocks in use" in said(session)
    session.answer("Hello")
    run_command(session, "/blocks")
    assert "~" in said(session)


@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("/n x", "n"),
        ("/n 3", "n"),
        ("/n 0 Hello", "n"),
        ("/beam", "beam"),
        ("/beam -1 Hello", "beam"),
        ("/watch x", "watch"),
    ],
)
def test_a_wrong_argument_is_said_and_changes_nothing(session, command, field):
    with pytest.raises(InvalidParameter) as error:
        run_command(session, command)
    assert error.value.field == field
    assert session.conversation.messages == []
    assert not session.engine.has_unfinished_requests()


def test_watching_needs_a_terminal(session):
    with pytest.raises(InvalidParameter, match="needs a terminal"):
        run_command(session, "/watch on")
    run_command(session, "/watch")
    assert said(session).endswith("(watching is off)\n")


def test_a_watched_answer_streams_over_the_pool_and_stays_as_bare_text(session):
    session.out = Console(file=io.StringIO(), width=80, force_terminal=True)
    run_command(session, "/watch on")
    session.answer("Hello")
    assert "·" in printed(session)  # free blocks
    assert printed(session).endswith(session.last.outputs[0].text + "\n")
    run_command(session, "/watch off")
    session.answer("Hello")
    assert printed(session).endswith(session.last.outputs[0].text + "\n")
