"""Stop strings across token borders: a window over the end of streamed text.

A stop string may begin in one token and end in another, and text that was shown cannot be taken back. So the window
keeps the end of the text for as long as it could still grow into a stop string, and shows the rest:

    stop = "\\n\\nUser:"        pushed      shown     kept
                               "Yes."      "Yes."    ""
                               "\\n"        ""        "\\n"
                               "\\nUs"      ""        "\\n\\nUs"
                               "ual"       "\\n\\nUsual"           it was something else
                               "\\n\\nUser:" ""        found

What is kept is the longest end of the text that begins a stop string: the least that is safe. (vLLM keeps one character
less than the longest stop string at all times, which delays every word of an ordinary answer.) It is also all that a
later search must see: wherever a stop string begins in earlier text, that beginning is part of what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Shown(NamedTuple):
    """The text that may be shown now, and the stop string that was found, if any."""

    text: str
    stop: str | None = None


class StopWindow:
    """Watches one sequence's text for `stop`, none of them empty. With `include_stop_str_in_output` nothing is delayed:
    whatever a stop string is made of will be shown anyhow."""

    def __init__(self, stop: Sequence[str] = (), include_stop_str_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._kept = ""

    def push(self, new_text: str, may_stop: bool = True) -> Shown:
        """Takes what one token added. Of several stop strings that it completes, the one that starts first is found; of
        those that start together, the one given first. The text after it is dropped.

        `may_stop` is False for the first min_tokens tokens: a stop string that ends in their text is never found, but
        one that only begins there is.
        """
        text = self._kept + new_text
        num_shown = len(self._kept) if self._include else 0
        found = self._find(text) if may_stop else None
        if found is not None:
            start, stop = found
            self._kept = ""
            return Shown(text[num_shown : start + len(stop)] if self._include else text[:start], stop)
        self._kept = self._beginning_of_a_stop(text)
        return Shown(text[num_shown:] if self._include else text.removesuffix(self._kept))

    def flush(self) -> str:
        """At the end of the sequence: the text kept for a stop string that will not come any more."""
        kept, self._kept = self._kept, ""
        return "" if self._include else kept

    def _find(self, text: str) -> tuple[int, str] | None:
        """(start, stop string) of the first match that ends in new text; one inside the kept text came too early."""
        matches = [(text.find(stop, max(0, len(self._kept) + 1 - len(stop))), stop) for stop in self._stop]
        return min((match for match in matches if match[0] >= 0), key=lambda match: match[0], default=None)

    def _beginning_of_a_stop(self, text: str) -> str:
        """The longest end of `text` with which some stop string begins; a whole stop string is not a beginning."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return end
        return ""
