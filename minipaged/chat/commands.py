"""What a line that begins with a slash does. Each command is a function; its docstring is its line of /help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from minipaged.chat.looks import set_watch, show_blocks, show_stats, show_why
from minipaged.chat.questions import ask_beams, ask_several
from minipaged.chat.session import ChatSession
from minipaged.errors import InvalidParameter


class Quit(Exception):  # noqa: N818  (not an error: the user is done)
    """The user has asked to leave."""


def run_command(session: ChatSession, line: str) -> None:
    """Run "/name argument". Raises InvalidParameter for an unknown name or a wrong argument, Quit for /quit."""
    name, _, argument = line.removeprefix("/").partition(" ")
    if name not in COMMANDS:
        raise InvalidParameter("command", f"/{name}", "there is none of this name; /help lists them")
    COMMANDS[name](session, argument.strip())


def show_help(session: ChatSession, _: str) -> None:
    """list the commands"""
    for name, command in COMMANDS.items():
        session.say(f"  /{name:<12}{command.__doc__}")
    session.say("  Ctrl-C stops an answer and keeps what was said; Ctrl-D at the prompt ends the chat")


def reset(session: ChatSession, _: str) -> None:
    """forget the conversation; the system prompt stays"""
    session.conversation.reset(session.conversation.system)
    session.say("(the conversation starts anew)")


def set_system(session: ChatSession, text: str) -> None:
    """TEXT  set the system prompt and start anew; without TEXT, show it"""
    if text:
        session.conversation.reset(text)
        session.say("(the conversation starts anew, with this system prompt)")
    else:
        session.say(session.conversation.system or "(the chat template's own)")


def set_temperature(session: ChatSession, text: str) -> None:
    """T  0 always takes the most probable token, 1 draws as the model says; without T, show it"""
    if text:
        try:
            temperature: float | str = float(text)
        except ValueError:
            temperature = text  # SamplingParams says what is allowed
        session.params = dataclasses.replace(session.params, temperature=temperature)
    session.say(f"(temperature {session.params.temperature:g})")


def leave(session: ChatSession, _: str) -> None:
    """end the chat"""
    raise Quit


COMMANDS: dict[str, Callable[[ChatSession, str], None]] = {
    "help": show_help,
    "reset": reset,
    "system": set_system,
    "temperature": set_temperature,
    "n": ask_several,
    "beam": ask_beams,
    "blocks": show_blocks,
    "watch": set_watch,
    "why": show_why,
    "stats": show_stats,
    "quit": leave,
}
