"""A worker without torch, for tests of the control plane: a pool of token ids, and a "model" that hashes what it reads.

The next token of a sequence is a hash of *everything it reads through its block table* (and of its seed). So a token
that lands in the wrong slot, a block that two sequences write, a copy that is skipped or a table that is stale
changes the tokens that come out, exactly as it would with real attention, at a thousandth of the cost. Slots start as
garbage.
"""

from __future__ import annotations

import hashlib
from math import exp, log
from random import Random

from minipaged.config import ModelConfig
from minipaged.step import (
    BestCandidates,
    Draw,
    Sample,
    SamplingWork,
    ScoredToken,
    ScorePrompt,
    StepPlan,
    StepResult,
    TokenLogprob,
)

GARBAGE = -1


class ShadowWorker:
    """Checks the contract of every plan as it applies it. `vocab_size` small makes end-of-sequence ids frequent."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 50,
        max_model_len: int = 1000,
        eos: tuple = (),
        num_host_blocks: int = 0,
    ) -> None:
        self.config = ModelConfig(vocab_size, 1, 1, 1, 1, 1, 1, max_model_len, eos_token_ids=eos)
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.num_host_blocks = num_host_blocks
        self.pool = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.host_pool = [[GARBAGE] * block_size for _ in range(num_host_blocks)]

    def execute(self, plan: StepPlan) -> StepResult:
        assert not (plan.swap_out and plan.swap_in), "swap out and swap in in one step"
        _move(self.pool, self.host_pool, plan.swap_out)
        _move(self.host_pool, self.pool, plan.swap_in)
        _move(self.pool, self.pool, plan.copies)
        self._write(plan)
        contexts = [self._read(row.block_table, row.start + len(row.token_ids)) for row in plan.work]
        return StepResult(
            tuple(self._answer(entry, contexts[entry.row], plan.work[entry.row].start) for entry in plan.sampling)
        )

    def _write(self, plan: StepPlan) -> None:
        written: dict[tuple[int, int], int] = {}
        for row in plan.work:
            assert row.token_ids, "a row without tokens"
            end = row.start + len(row.token_ids)
            assert len(row.block_table) == -(-end // self.block_size), "a table with a spare or a missing block"
            for position, token in enumerate(row.token_ids, row.start):
                slot = row.block_table[position // self.block_size], position % self.block_size
                assert written.setdefault(slot, row.seq_id) == row.seq_id, "two sequences write one slot"
                self.pool[slot[0]][slot[1]] = token

    def _read(self, block_table: tuple[int, ...], length: int) -> tuple[int, ...]:
        flat = [token for block in block_table for token in self.pool[block]][:length]
        assert GARBAGE not in flat, "a slot is read that nobody wrote"
        return tuple(flat)

    def _answer(self, entry: SamplingWork, context: tuple[int, ...], start: int) -> tuple:
        if isinstance(entry, Sample):
            return tuple(self._draw(context, seed, position) for seed, position in entry.draws)
        if isinstance(entry, BestCandidates):
            ranked = sorted(enumerate(beam_logprobs(context, self.vocab_size)), key=lambda pair: (-pair[1], pair[0]))
            return tuple(TokenLogprob(token, logprob, i + 1) for i, (token, logprob) in enumerate(ranked[: entry.k]))
        assert isinstance(entry, ScorePrompt)
        first = start + entry.first + 1  # the position of the first target
        return tuple(
            ScoredToken(TokenLogprob(token, shadow_logprob(context[:position]), 1), ())
            for position, token in enumerate(entry.targets, first)
        )

    def _draw(self, context: tuple[int, ...], seed: int, position: int) -> Draw:
        token = next_token(context, seed, position, self.vocab_size)
        return Draw(token, TokenLogprob(token, -1.0, 1), ())


def _move(source: list[list[int]], target: list[list[int]], pairs: tuple[tuple[int, int], ...]) -> None:
    destinations = {block for _, block in pairs}
    assert len(destinations) == len(pairs), "two blocks into one"
    if source is target:
        assert not destinations & {block for block, _ in pairs}, "a block is source and destination of copies"
    for block, destination in pairs:
        target[destination] = list(source[block])


def next_token(context: tuple[int, ...], seed: int, position: int, vocab_size: int) -> int:
    """The shadow model: what follows a context."""
    digest = hashlib.blake2b(repr((context, seed, position)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % vocab_size


def shadow_logprob(context: tuple[int, ...]) -> float:
    """The "log-probability" of a prompt token: a number that depends on everything before it."""
    return -float(next_token(context, 0, 0, 97))


def beam_logprobs(context: tuple[int, ...], vocab_size: int) -> list[float]:
    """The log-probability of each token after a context, for beam search."""
    digest = hashlib.blake2b(repr(context).encode(), digest_size=8).digest()
    scores = [random.gauss(0, 2) for random in [Random(digest)] for _ in range(vocab_size)]
    total = log(sum(map(exp, scores)))
    return [score - total for score in scores]


def solo_tokens(prompt: tuple[int, ...], seed: int, max_tokens: int, vocab_size: int = 50) -> tuple[int, ...]:
    """What a request must answer, computed with no pool, no batch and no scheduler."""
    tokens = prompt
    for position in range(max_tokens):
        tokens += (next_token(tokens, seed, position, vocab_size),)
    return tokens[len(prompt) :]
