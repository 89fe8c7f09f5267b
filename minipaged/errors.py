"""Every error that minipaged raises on purpose, in one place.

A user's mistake is a `ValueError` whose message names the field, its value and what is allowed. An error of the block
rooms is a `BlockError`: a user never sees one, unless a rule of this program is broken.
"""

from __future__ import annotations

from typing import Any


class MinipagedError(Exception):
    """The root: `except MinipagedError` catches everything that this package raises on purpose."""


class InvalidInput(MinipagedError, ValueError):
    """A user's mistake. `field` and `value` are kept for programs; the message is for people."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field = field
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field} = {_shown(self.value)}: {self.allowed}"


def _shown(value: Any) -> str:
    """The value in at most 120 characters, whatever its own repr may do."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits has none
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else text[:117] + "..."


class InvalidParameter(InvalidInput):
    """A sampling or engine parameter out of range, of the wrong type, or not supported."""


class InvalidPrompt(InvalidInput):
    """A prompt that is empty, too long, or names tokens that the model does not have."""


class ModelNotFound(InvalidInput):
    """The path or hub id leads to no model."""


class UnsupportedModel(InvalidInput):
    """The model is there, but it is of a kind that minipaged does not run."""


class BrokenCheckpoint(InvalidInput):
    """The model's files are truncated, or contradict each other."""


class BlockError(MinipagedError, RuntimeError):
    """A rule of the KV cache manager was broken."""


class OutOfBlocks(BlockError):
    """More blocks were asked for than are free; nothing was taken."""


class DoubleFree(BlockError):
    """A block with no reference was freed; nothing was changed."""


class UnknownSequence(BlockError):
    """The sequence has no block table."""


class InvariantBroken(BlockError):
    """A `check()` found that an equation does not hold; the message is the equation with its numbers."""


class IllegalTransition(MinipagedError, RuntimeError):
    """A sequence group was moved between two states that no rule connects."""


class EngineDead(MinipagedError, RuntimeError):
    """The engine's ranks have ended: no step can run any more."""


class RankFailed(EngineDead):
    """A rank died or raised, and so the engine is over. `rank` says which; the message holds its traceback."""

    def __init__(self, rank: int, story: str) -> None:
        super().__init__(rank, story)
        self.rank = rank
        self.story = story

    def __str__(self) -> str:
        return f"rank {self.rank} {self.story}"
