"""A sequence: the tokens of one answer, and how many of them have their KV in the cache.

    tokens         P P P P P P P g g g g        P prompt, g generated
    num_computed   ───────────────────▶ 10      one token (the one sampled last) is uncomputed: a decode

This pair is the one rule for all work: a step gives each running sequence some of its uncomputed tokens. A prefill
has many of them, a decode exactly one, and a sequence that lost its blocks simply starts again from num_computed = 0.
"""

from __future__ import annotations

from typing import NamedTuple


class Stem(NamedTuple):
    """Where a preempted sequence's beginning will come from: a sibling's first full blocks, computed once again."""

    sibling: Sequence
    num_blocks: int


class Sequence:
    """`seed` is this sample's own: the noise of its draws is a function of the seed and the output position alone."""

    def __init__(self, seq_id: int, prompt_token_ids: tuple[int, ...], seed: int) -> None:
        self.seq_id = seq_id
        self.seed = seed
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed = 0
        self.num_once_computed = 0  # the most that num_computed was before blocks were lost
        self.finish_reason: str | None = None
        self.stem: Stem | None = None
        self._token_ids = list(prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self._token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self._token_ids) - self.num_computed

    @property
    def is_prefill(self) -> bool:
        """More than the last token is uncomputed."""
        return self.num_uncomputed > 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids[: self.num_prompt_tokens])

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids[self.num_prompt_tokens :])

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions start … stop - 1."""
        return tuple(self._token_ids[start:stop])

    def append(self, token_id: int) -> None:
        """A token was sampled. Its KV is computed when it is fed, one step later."""
        self._token_ids.append(token_id)

    def fork(self, seq_id: int, seed: int) -> Sequence:
        """A sequence of its own with the same tokens so far."""
        child = Sequence(seq_id, self.prompt_token_ids, seed)
        child._token_ids += self.output_token_ids
        child.num_computed = self.num_computed
        child.num_once_computed = self.num_once_computed
        return child

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}: {self.num_computed} of {self.num_tokens} tokens computed)"
