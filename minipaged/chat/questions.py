"""Questions beside the conversation: several answers to one message, drawn or searched for."""

from __future__ import annotations

import dataclasses

from rich.table import Table
from rich.text import Text

from minipaged.beam_search_params import BeamSearchParams
from minipaged.chat.session import ChatSession
from minipaged.errors import InvalidParameter
from minipaged.outputs import CompletionOutput

DEFAULT_BEAM_TOKENS = 64  # a beam search shows nothing before it is over


def ask_several(session: ChatSession, text: str) -> None:
    """K QUESTION  K answers side by side, from one prompt that is computed once; the conversation stays as it was"""
    count, question = _count_and_question("n", text)
    params = dataclasses.replace(session.params, n=count)
    output = session.ask_aside(question, params)
    _print_side_by_side(session, [f"answer {i + 1}" for i in range(count)], output.outputs)


def ask_beams(session: ChatSession, text: str) -> None:
    """K QUESTION  the K most probable answers by beam search, with their log-probabilities; the conversation stays"""
    width, question = _count_and_question("beam", text)
    max_tokens = min(session.params.max_tokens or DEFAULT_BEAM_TOKENS, DEFAULT_BEAM_TOKENS)
    output = session.ask_aside(question, BeamSearchParams(beam_width=width, max_tokens=max_tokens))
    titles = [f"log-probability {answer.cumulative_logprob:.2f}" for answer in output.outputs]
    _print_side_by_side(session, titles, output.outputs)


def _count_and_question(name: str, text: str) -> tuple[int, str]:
    number, _, question = text.partition(" ")
    if not number.isdecimal() or not question.strip():
        raise InvalidParameter(name, text, f"must be a number and a question: /{name} 3 Who are you?")
    return int(number), question.strip()


def _print_side_by_side(session: ChatSession, titles: list[str], answers: list[CompletionOutput]) -> None:
    """Columns where the console is wide enough for them, else one below the other."""
    if any(answer.finish_reason == "abort" for answer in answers):
        session.say("(stopped)")
    if session.out.width < 24 * len(answers):
        for title, answer in zip(titles, answers, strict=True):
            session.say(f"{title}:")
            print(answer.text, file=session.out.file, flush=True)
        return
    table = Table(expand=True)
    for title in titles:
        table.add_column(title, ratio=1)
    table.add_row(*(Text(answer.text.strip()) for answer in answers))
    session.out.print(table)
