"""Chat messages to token ids, and how a conversation goes on without being encoded anew.

A chat template is a small program (Jinja) that comes with a model and turns messages into the text that the model was
trained on. transformers renders it, in its sandbox: templates are other people's code.

A chat that renders and encodes the whole conversation at every turn would often get *other* tokens for the old part:
the model may have spelled its answer in tokens that encoding the same text does not give. Then the KV of that answer is
lost. So the chat keeps token ids, and appends only what the template adds after the answer:

    kept     <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎   Hello!<|im_end|>
    added                                                            ⏎<|im_start|>user⏎How are you?<|im_end|>⏎ ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minipaged.errors import InvalidPrompt
from minipaged.text.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
ANSWER_MARK = "ANSWERc0ffee5eed"  # stands for an answer; letters and digits, which no template trims or escapes

Message = Mapping[str, Any]  # {"role": one of ROLES, "content": text}


def render(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """The text of a conversation; `add_generation_prompt` adds the beginning of the assistant's answer.

    Raises InvalidPrompt where a message is malformed, where the model has no template or where the template refuses.
    """
    _check_messages(messages)
    if not tokenizer.has_chat_template:
        raise InvalidPrompt("messages", messages, "this model has no chat template; give it a prompt instead")

    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template  # late, because slow

    try:
        texts, _ = render_jinja_template(
            [list(messages)],
            chat_template=tokenizer.chat_template,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens,
        )
    except TemplateError as error:
        raise InvalidPrompt("messages", messages, f"the model's chat template refuses them: {error}") from error
    return texts[0]


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The token ids of a conversation, ready for the assistant's answer. Raises InvalidPrompt as `render` does."""
    return tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)  # the template writes them itself


def continue_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], token_ids: Sequence[int]
) -> list[int] | None:
    """The token ids of a conversation as a continuation of `token_ids`, which end with its last answer.

    `messages` is the whole conversation, the new message behind that answer included. None where there is no answer
    yet, or where the template does not allow to continue: it changes or repeats the answer, or now writes something
    else before it. Then `encode_chat` is the way. Raises InvalidPrompt as `render` does.
    """
    _check_messages(messages)
    answer = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if answer == 0:
        return None
    marked = [*messages[:answer], {**messages[answer], "content": ANSWER_MARK}, *messages[answer + 1 :]]
    before, *after = render(tokenizer, marked).split(ANSWER_MARK)
    if len(after) != 1 or before.rstrip() != render(tokenizer, messages[:answer]).rstrip():
        return None
    suffix = _without_end_of_turn(tokenizer, after[0], token_ids[-1])
    return [*token_ids, *tokenizer.encode(suffix, add_special_tokens=False)]


def _without_end_of_turn(tokenizer: Tokenizer, suffix: str, last_token_id: int) -> str:
    """The suffix without the end-of-turn token that it begins with, if the model has generated that already.

    An answer that was cut short has none, and gets it from the suffix.
    """
    if last_token_id not in tokenizer.all_special_ids:
        return suffix
    end_of_turn = tokenizer.token_text(last_token_id)
    stripped = suffix.lstrip()  # some templates write a space between an answer and its end
    return stripped[len(end_of_turn) :] if stripped.startswith(end_of_turn) else suffix


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidPrompt("messages", messages, "must be a non-empty list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidPrompt(f"messages[{i}]", message, 'must be {"role": ..., "content": ...}')
        if message.get("role") not in ROLES:
            raise InvalidPrompt(f"messages[{i}]['role']", message.get("role"), f"must be one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise InvalidPrompt(f"messages[{i}]['content']", message.get("content"), "must be text")
