"""The recorder: an `on_step` that keeps every frame, to look at now, to step back to, or to save for another day.

    recorder = Recorder()
    llm = LLM(block_size=4, on_step=recorder)
    llm.generate(...)
    rich.print(recorder.draw())                # the last step; recorder.draw(0) is the first
    recorder.save("steps.jsonl")               # Recorder.load("steps.jsonl") needs no model

A recording is JSON lines: a first line about the whole, then one line for each frame. Nothing is left out, so it grows
with every step: for thousands of steps there is `Trace`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import RenderableType

from minipaged.errors import InvalidParameter
from minipaged.show.contents import Words
from minipaged.show.frame import Frame, token_ids
from minipaged.show.json_frames import from_json, to_json
from minipaged.show.step_picture import draw_frame
from minipaged.snapshot import OnStep, Snapshot
from minipaged.step import StepPlan, StepResult

FORMAT = "minipaged frames 1"


class Recorder:
    """Keeps every frame. `token_text` gives a token's text (`Tokenizer.token_text`); without it, tokens are numbers."""

    def __init__(self, token_text: Callable[[int], str] | None = None, title: str = "") -> None:
        self.frames: list[Frame] = []
        self.token_text = token_text
        self.title = title
        self._words: dict[int, str] = {}

    def __call__(self, plan: StepPlan, result: StepResult, snapshot: Snapshot) -> None:
        self.frames.append(Frame(plan, result, snapshot))

    @property
    def words(self) -> Words:
        """The texts of all tokens that occur in the frames, as far as they are known."""
        if self.token_text is not None:
            for frame in self.frames:
                for token_id in token_ids(frame):
                    if token_id not in self._words:
                        self._words[token_id] = self.token_text(token_id)
        return self._words

    def draw(self, index: int = -1) -> RenderableType:
        """The picture of one step."""
        return draw_frame(self.frames, index, self.words)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all frames, and the texts of their tokens, as JSON lines."""
        head = {"format": FORMAT, "title": self.title, "words": self.words}
        with open(path, "w", encoding="utf-8") as file:
            for line in (head, *map(to_json, self.frames)):
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recorder:
        """What `save` has written. Raises InvalidParameter for a file that is none, naming the line."""
        recorder = cls()
        number = 0
        try:
            for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):  # noqa: B007
                data = json.loads(line)
                if number == 1:
                    recorder._read_head(data)
                else:
                    recorder.frames.append(from_json(data))
        except OSError as error:
            raise InvalidParameter("recording", str(path), f"cannot be read ({error.strerror})") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidParameter(
                "recording", str(path), f"line {number} is not of a recording ({error!r})"
            ) from error
        if number == 0:
            raise InvalidParameter("recording", str(path), "is empty")
        return recorder

    def _read_head(self, head: dict) -> None:
        if head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']!r}, not {FORMAT!r}")
        self.title = head["title"]
        self._words = {int(token_id): text for token_id, text in head["words"].items()}


def each(*hooks: OnStep | None) -> OnStep:
    """One `on_step` that calls several, in this order; None is nobody."""

    def on_step(plan: StepPlan, result: StepResult, snapshot: Snapshot) -> None:
        for hook in hooks:
            if hook is not None:
                hook(plan, result, snapshot)

    return on_step
