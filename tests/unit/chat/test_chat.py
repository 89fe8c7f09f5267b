"""The chat over a shadow worker and the default model's tokenizer: nonsense answers, real conversations."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from minipaged.chat.__main__ import converse, main
from minipaged.chat.commands import COMMANDS, Quit, run_command
from minipaged.chat.session import ChatSession
from minipaged.engine.conversation import Conversation
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidInput, UnsupportedModel
from minipaged.sampling_params import SamplingParams
from minipaged.step import Draw, StepResult
from minipaged.text.tokenizer import Tokenizer
from tests.shadow_worker import ShadowWorker

pytestmark = pytest.mark.real_model


def make_session(tokenizer, max_model_len=200, max_tokens=12, num_blocks=60):
    worker = ShadowWorker(num_blocks, 4, vocab_size=tokenizer.vocab_size, max_model_len=max_model_len)
    engine = LLMEngine(EngineArgs(block_size=4, enable_prefix_caching=True), worker, tokenizer)
    out, notes = (Console(file=io.StringIO(), width=300) for _ in range(2))
    return ChatSession(engine, SamplingParams(max_tokens=max_tokens, seed=1), None, out, notes)


def said(session):
    return session.notes.file.getvalue()


def prompts_of(session):
    """Spy on the engine: the token ids of each prompt that is asked, in order."""
    prompts = []
    add = session.engine.add_request

    def spy(request_id, prompt, params):
        prompts.append(prompt["prompt_token_ids"])
        add(request_id, prompt, params)

    session.engine.add_request = spy
    return prompts


def test_what_streams_is_the_answer_s_text(session):
    session.answer("Hello")
    assert session.out.file.getvalue() == session.last.outputs[0].text + "\n"
    assert "(cut after 12 tokens: --max-tokens" in said(session)


def test_each_turn_continues_the_tokens_of_the_last_one_exactly(session):
    prompts = prompts_of(session)
    session.answer("Hello")
    for message in ("And then?", "Why?"):
        before = prompts[-1] + session.last.outputs[0].token_ids
        session.answer(message)
        assert prompts[-1][: len(before)] == before
        added = session.engine.tokenizer.decode(prompts[-1][len(before) :], skip_special_tokens=False)
        assert added == f"<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_that_outgrows_the_context_forgets_its_oldest_exchanges_and_says_so(tokenizer):
    session = make_session(tokenizer, max_model_len=80, max_tokens=10)
    for message in ("first question", "second question", "third question"):
        session.answer(message)
    assert "outgrew the context of 80 tokens: its oldest 1 exchange(s) are forgotten" in said(session)
    assert session.conversation.messages[0]["content"] == "second question"


def test_a_message_too_long_for_the_context_is_refused_and_the_conversation_goes_on(session):
    session.answer("Hello")
    before = list(session.conversation.messages)
    with pytest.raises(InvalidInput, match=r"room for an answer of 12 tokens in the context of 200"):
        session.answer("word " * 300)
    assert session.conversation.messages == before
    session.answer("Hello again")


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(session):
    execute, steps = session.engine.worker.execute, []

    def interrupted(plan):
        steps.append(plan.step)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return execute(plan)

    session.engine.worker.execute = interrupted
    session.answer("Hello")
    assert session.last.outputs[0].finish_reason == "abort"
    assert len(session.last.outputs[0].token_ids) == 5
    assert session.conversation.messages[-1] == {"role": "assistant", "content": session.last.outputs[0].text}
    assert "(stopped)" in said(session)
    assert session.engine.blocks.num_free == session.engine.blocks.num_blocks
    session.engine.worker.execute = execute
    session.answer("Go on")
    assert session.last.outputs[0].finish_reason == "length"


def test_a_failed_step_is_said_and_the_message_is_forgotten(session):
    session.engine.worker.execute = lambda plan: (_ for _ in ()).throw(RuntimeError("no memory"))
    session.answer("Hello")
    assert "the step failed: RuntimeError('no memory')" in said(session)
    assert session.conversation.messages == []


def test_the_next_turn_begins_with_what_the_last_one_computed(session):
    session.answer("Hello")
    session.answer("And then?")
    run_command(session, "/stats")
    assert session.last.num_cached_tokens == (31 + 11) // 4 * 4  # all but the last token of the answer, in whole blocks
    assert "of which 40 came from the prefix cache" in said(session)


def test_commands_change_what_they_say(session):
    session.answer("Hello")
    run_command(session, "/stats")
    assert "prompt 31 tokens, of which 0 came from the prefix cache; answer 12 tokens" in said(session)
    assert "KV blocks in use 11 of 60; filled 42 of 44 slots (95%)" in said(session)
    run_command(session, "/temperature 0.25")
    assert session.params.temperature == 0.25
    run_command(session, "/system Be brief.")
    assert (session.conversation.system, session.conversation.messages) == ("Be brief.", [])
    prompts = prompts_of(session)
    session.answer("Hello")
    assert "system\nBe brief.<|im_end|>" in session.engine.tokenizer.decode(prompts[0], skip_special_tokens=False)
    run_command(session, "/reset")
    assert (session.conversation.system, session.conversation.messages) == ("Be brief.", [])
    run_command(session, "/help")
    assert all(f"/{name}" in said(session) for name in COMMANDS)
    with pytest.raises(Quit):
        run_command(session, "/quit")


@pytest.mark.parametrize("line", ["/temperature hot", "/temperature -1", "/temperature nan", "/nonsense"])
def test_a_mistake_in_a_command_is_explained_and_changes_nothing(session, line):
    before = session.params
    with pytest.raises(InvalidInput):
        run_command(session, line)
    assert session.params == before


def test_lines_from_a_pipe_are_messages_and_commands_until_quit(session, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n/temperature x\n/quit\nnever read\n"))
    converse(session)
    assert [m["role"] for m in session.conversation.messages] == ["user", "assistant"]
    assert "temperature = 'x'" in said(session)


def test_the_end_of_a_pipe_ends_the_chat(session, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    converse(session)
    assert len(session.conversation.messages) == 2


def test_a_wrong_argument_is_explained_without_a_traceback(capsys):
    assert main(["--model", "/no/such/place"]) == 2
    assert "model = '/no/such/place'" in capsys.readouterr().err
    assert main(["--temperature", "-1"]) == 2
    assert "temperature = -1.0" in capsys.readouterr().err


def test_a_conversation_encoded_turn_by_turn_reads_as_the_template_writes_it(tokenizer):
    conversation = Conversation(tokenizer, context=500, room=50, system="Be brief.")
    conversation.ask("One?")
    answer = tokenizer.encode("1.", add_special_tokens=False) + [tokenizer.eos_token_id]
    conversation.answered("1.", answer)
    turn = conversation.ask("Two?")
    assert tokenizer.decode(turn.token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\n1.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )


def answering(session, text):
    """Let the worker spell this text, and then end."""
    ids = [*session.engine.tokenizer.encode(text, add_special_tokens=False), session.engine.tokenizer.eos_token_id]
    execute = session.engine.worker.execute

    def spell(plan):
        result = execute(plan)
        position = plan.sampling[0].draws[0][1] if plan.sampling else 0
        return StepResult(tuple((Draw(ids[position], None, ()),) for _ in result.entries))

    session.engine.worker.execute = spell


def test_the_answer_is_written_as_it_is(tokenizer):
    session = make_session(tokenizer, max_model_len=400, max_tokens=80)
    text = "if x:\n\treturn [red]:smile:[/red]\r\n" + "a long line " * 12
    answering(session, text)
    session.answer("Hello")
    assert session.out.file.getvalue() == text + "\n"


def test_an_answer_that_fills_the_context_says_so(tokenizer):
    session = make_session(tokenizer, max_model_len=70, max_tokens=500)
    session.answer("Hello")
    assert "(cut after 39 tokens: the context is full)" in said(session)


def test_a_pool_smaller_than_the_context_is_the_context(tokenizer):
    session = make_session(tokenizer, num_blocks=20, max_tokens=12)
    for _ in range(4):
        session.answer("What was that again?")
    assert "outgrew the context of 80 tokens" in said(session)


def test_a_message_that_got_no_answer_leaves_the_tokens_as_they_were(session):
    session.answer("Hello")
    prompts = prompts_of(session)
    before = session.conversation._token_ids
    execute = session.engine.worker.execute
    session.engine.worker.execute = lambda plan: (_ for _ in ()).throw(RuntimeError("no memory"))
    session.answer("Lost")
    session.engine.worker.execute = execute
    session.answer("And then?")
    assert prompts[-1][: len(before)] == before


def test_a_model_without_a_chat_template_is_refused_at_the_start(tokenizer):
    bare = Tokenizer(tokenizer._backend, tokenizer.special_tokens)
    with pytest.raises(UnsupportedModel, match="chat template = None"):
        make_session(bare)


def test_stats_of_an_answer_that_was_stopped_before_it_began(session):
    execute = session.engine.add_request

    def abort_at_once(request_id, prompt, params):
        execute(request_id, prompt, params)
        session.engine.abort_request(request_id)

    session.engine.add_request = abort_at_once
    session.answer("Hello")
    run_command(session, "/stats")
    assert "KV blocks in use 0 of 60" in said(session)


@pytest.mark.parametrize("stop", ["the whole pipe is read", "the reader leaves"])
def test_the_program_answers_through_pipes(stop):
    """The real model in a process of its own, with bytes on its input that are no text."""
    command = [sys.executable, "-m", "minipaged.chat", "--temperature", "0", "--max-tokens", "20"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, env=env
    )
    if stop == "the reader leaves":
        process.stdout.close()
        process.stdout = None
    out, err = process.communicate(b"What is the capital of France?\n/temperature \xff\n/quit\n", timeout=120)
    assert process.returncode == 0, err.decode()
    assert b"Traceback" not in err
    if out is not None:
        assert out.decode() == "The capital of France is Paris.\n"
        assert b"must be a finite number" in err


def test_a_chat_leaves_a_trace_of_all_its_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/quit\n"))
    assert main(["--temperature", "0", "--max-tokens", "3", "--trace", str(tmp_path / "out.html")]) == 0
    page = (tmp_path / "out.html").read_text()
    assert "prefills A: 31 tokens" in page
    assert '"sequences":[1,1,1]' in page
