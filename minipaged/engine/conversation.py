"""A conversation as token ids: each turn continues the last one's tokens exactly, and it stays within the context.

    turn 1   [system, user 1 ........] [answer 1 .....]
    turn 2   [same tokens ............ same tokens ....] [what the template adds: end of turn, user 2] [answer 2 ...]

When prompt and answer would not fit any more, the oldest exchanges are forgotten (the system prompt stays) and the
rest is encoded anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minipaged.errors import InvalidPrompt
from minipaged.text.chat_template import continue_conversation, encode_chat
from minipaged.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turn:
    """What to feed for the next answer, and how many old exchanges had to go for it."""

    token_ids: list[int]
    num_forgotten: int


@dataclass
class Conversation:
    """`room` is how many tokens of the `context` an answer shall have space for."""

    tokenizer: Tokenizer
    context: int
    room: int
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)  # without the system prompt
    _token_ids: list[int] = field(default_factory=list)  # of everything so far, the last answer included
    _before: tuple[list[dict[str, str]], list[int]] = ((), ())  # messages and token ids before the last `ask`

    def reset(self, system: str | None = None) -> None:
        """Start anew; the system prompt is the given one."""
        self.system = system
        self.messages = []
        self._token_ids = []

    def ask(self, text: str) -> Turn:
        """Add the user's message; returns the prompt for the answer.

        Raises InvalidPrompt where even this message alone leaves no room; the conversation is then as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        token_ids = None
        if self._token_ids:
            token_ids = continue_conversation(self.tokenizer, self._with_system(messages), self._token_ids)
        forgotten = 0
        while token_ids is None or len(token_ids) + self.room > self.context:
            if token_ids is not None:
                if len(messages) < 3:
                    raise InvalidPrompt(
                        "message",
                        text,
                        f"has {len(token_ids)} tokens with the template; {self.context - self.room} leave room "
                        f"for an answer of {self.room} tokens in the context of {self.context}",
                    )
                messages = messages[2:]
                forgotten += 1
            token_ids = encode_chat(self.tokenizer, self._with_system(messages))
        self._before = (self.messages, self._token_ids)
        self.messages, self._token_ids = messages, token_ids
        return Turn(token_ids, forgotten)

    def answered(self, text: str, token_ids: Sequence[int]) -> None:
        """The answer as it came, complete or cut short."""
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self._token_ids = [*self._token_ids, *token_ids]

    def take_back(self) -> None:
        """Nothing came in answer to the last message: all is as before it was asked."""
        self.messages, self._token_ids = self._before

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]
