"""Text as it is generated: each new token gives the text that it adds, and the parts add up to the whole.

Decoding tokens one by one would be wrong. A character may be split over tokens (an emoji is often four), and some
tokenizers drop the space before the first word of a text. Decoding everything anew at each token would be right, but a
long answer would cost the square of its length. So a small window is decoded, twice a token:

    tokens   ... A B C D E F            window: what the last emission showed (context), and what came since
                       ─── ─            D E are shown already, F is new
                           ▲
    new text = decode(D E F) minus as many characters as decode(D E) has

The context makes F appear as it does in the middle of a text. The window may only be cut where a character ends: an
unfinished character decodes to U+FFFD at the end of the window, so nothing is shown while one stands there.

The sum of all parts equals decoding the whole output behind its prompt at once. One exception is left to tokenizers
that spell rare characters byte by byte ("byte fallback"): when such a run turns out to be no valid UTF-8, decoding it
at once turns even its valid characters into U+FFFD, and those were shown already. Shown text is never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipaged.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one

# An unfinished character has at most 3 bytes, hence 3 tokens. What makes the window longer than this is therefore no
# character but garbage, and shown as such: a model that produces nothing else would make the window grow for ever.
MAX_WINDOW = 32
TAIL = 3  # of which so many tokens stay: they hold every byte that a character may still need
PROMPT_CONTEXT = 24  # at most so many tokens of the prompt begin the window


class IncrementalDetokenizer:
    """Detokenises one sequence. The prompt is only context: its text is not part of `text`.

    Where the prompt ends inside a character, that character belongs to the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._join_special = not skip_special_tokens and not spaces_between_special_tokens
        self._parts: list[str] = []
        self._window = self._context(prompt_token_ids)
        self._context_length = 0  # how many tokens of the window are context, and can be cut off next time
        self._num_shown = len(self._decode().rstrip(REPLACEMENT))  # characters of the window that are out

    @property
    def text(self) -> str:
        """All text that was returned so far."""
        return "".join(self._parts)

    def append(self, token_id: int) -> str:
        """The text that this token adds; "" where it finishes no character, or shows nothing."""
        if not self._is_visible(token_id):  # it must not enter the window: a run of them would push the context out
            return ""
        before = self._part_specials(token_id) if self._join_special else ""
        self._window.append(token_id)
        return before + self._emit(self._settle())

    def finish(self) -> str:
        """The text that was held back, at the end of the sequence: an unfinished character shows as U+FFFD."""
        text = self._decode()
        new_text = text[self._num_shown :]
        self._num_shown = len(text)
        return self._emit(new_text)

    def _settle(self) -> str:
        """What the window shows beyond what was shown before; moves the window on where that is possible."""
        text = self._decode()
        if len(text) > self._num_shown and not text.endswith(REPLACEMENT):
            new_text = text[self._num_shown :]
            del self._window[: self._context_length]
            self._context_length = len(self._window)
            self._num_shown = len(self._decode())
            return new_text
        if len(self._window) <= MAX_WINDOW:
            return ""
        new_text = text.removesuffix(REPLACEMENT)[self._num_shown :]  # the last one may be a character's beginning
        del self._window[:-TAIL]
        self._context_length = 0
        self._num_shown = len(self._decode().removesuffix(REPLACEMENT))
        return new_text

    def _part_specials(self, token_id: int) -> str:
        """Between two neighbouring special tokens the text is cut, so that a decoder puts no space there."""
        special = self._tokenizer.all_special_ids
        if not (self._window and self._window[-1] in special and token_id in special):
            return ""
        held = self.finish()
        self._window, self._context_length, self._num_shown = [], 0, 0
        return held

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last few visible tokens of the prompt; more of them where few would begin inside a character."""
        tail = [token_id for token_id in prompt_token_ids[-PROMPT_CONTEXT:] if self._is_visible(token_id)]
        short = tail[-6:]
        return tail if REPLACEMENT in self._tokenizer.decode(short, self._skip_special) else short

    def _is_visible(self, token_id: int) -> bool:
        return not (self._skip_special and token_id in self._tokenizer.all_special_ids) and token_id in self._tokenizer

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special)

    def _emit(self, new_text: str) -> str:
        if new_text:
            self._parts.append(new_text)
        return new_text
