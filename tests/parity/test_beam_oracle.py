"""The beam oracle is right: it finds what transformers' `generate(num_beams=k)` finds, wherever float32 can tell.

transformers sums log-probabilities in float32, so a case counts only if no decision in it was closer than CLEAR. Nearly
all must be that clear, and in most of them sequences must end inside the beams: most rules speak of nothing else.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch

from tests.beam_oracle import BeamResult, beam_search
from tests.tiny_llama import random_prompt, tiny_llama

CLEAR = 1e-4
NO_TOKEN = [61]  # beyond the vocabulary: an end of sequence that never comes
SETTINGS = [
    *product((2, 3, 4, 5), (0.5, 1.0, 2.0), (False, True, "never")),
    *product((3,), (0.0, -1.0), (False, True, "never")),
]  # width, length penalty, early stopping


class Case(NamedTuple):
    """Everything that transformers must be told."""

    shape: str
    prompt_seed: int
    max_tokens: int
    eos: tuple[int, ...]
    width: int
    length_penalty: float
    early_stopping: bool | str


class Compared(NamedTuple):
    case: Case
    ours: BeamResult
    theirs: list[tuple[list[int], float]]  # tokens and score, best first


def prompt_of(seed: int) -> list[int]:
    return random_prompt(3 + seed % 5, seed)


@cache
def logprobs(shape: str, prompt_seed: int, tokens: tuple[int, ...]) -> list[float]:
    """After the prompt and these tokens, in float64. Cached, for the same beams come up in many settings."""
    logits = tiny_llama(shape).logits(prompt_of(prompt_seed) + list(tokens))[-1]  # [V]
    return logits.log_softmax(-1).tolist()


def ours(case: Case) -> BeamResult:
    def after(tokens: list[int]) -> list[float]:
        return logprobs(case.shape, case.prompt_seed, tuple(tokens))

    return beam_search(after, case.width, case.max_tokens, case.eos, case.length_penalty, case.early_stopping)


def theirs(case: Case) -> list[tuple[list[int], float]]:
    prompt = torch.tensor([prompt_of(case.prompt_seed)])  # [1, len]
    generated = tiny_llama(case.shape).twin.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=case.width,
        num_return_sequences=case.width,
        max_new_tokens=case.max_tokens,
        eos_token_id=list(case.eos) or NO_TOKEN,
        pad_token_id=0,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = generated.sequences[:, prompt.shape[1] :].tolist()  # [width][max_tokens or fewer]
    scores = generated.sequences_scores.tolist()
    return [(unpadded(row, case.eos), score) for row, score in zip(rows, scores, strict=True)]


def unpadded(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    """Up to the first end of sequence, which they keep and pad behind."""
    ends = [position for position, token_id in enumerate(tokens) if token_id in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def tokens_inside_beams(shape: str, prompt_seed: int, max_tokens: int, count: int) -> tuple[int, ...]:
    """The tokens that beams without an end pass through most often: as ends of sequence they will really occur."""
    free = ours(Case(shape, prompt_seed, max_tokens, (), 5, 1.0, False))
    passed = Counter(token_id for one in free.found for token_id in one.tokens[1:])
    return tuple(token_id for token_id, _ in passed.most_common(count))


@cache
def compared(shapes: tuple[str, ...], num_prompts: int) -> list[Compared]:
    """Every setting on every shape and prompt, with one or two ends of sequence; and once without any."""
    cases = []
    for shape, prompt_seed in product(shapes, range(num_prompts)):
        max_tokens = 8 + 4 * (prompt_seed % 3)
        eos = tokens_inside_beams(shape, prompt_seed, max_tokens, count=1 + prompt_seed % 2)
        cases += [Case(shape, prompt_seed, max_tokens, eos, *setting) for setting in SETTINGS]
        cases.append(Case(shape, prompt_seed, max_tokens, (), 4, 1.0, False))
    return [Compared(case, ours(case), theirs(case)) for case in cases]


MATRICES = [
    pytest.param(("gqa", "mqa", "llama3_rope"), 2, id="some"),
    pytest.param(("mha", "gqa", "biases", "tied", "wide_heads", "linear_rope"), 4, id="many", marks=pytest.mark.slow),
]


def check(case: Case, result: BeamResult, expected: list[tuple[list[int], float]]) -> None:
    assert [one.tokens for one in result.found] == [tokens for tokens, _ in expected], case
    # float32 resolves 6e-8 of a sum, and a penalty of at most 0 does not divide the sum's error
    scores = pytest.approx([score for _, score in expected], abs=1e-5, rel=1e-6)
    assert [one.score for one in result.found] == scores, case


@pytest.mark.parametrize(("shapes", "num_prompts"), MATRICES)
def test_the_oracle_finds_what_transformers_finds(shapes, num_prompts):
    for case, result, expected in compared(shapes, num_prompts):
        if result.smallest_gap > CLEAR:
            check(case, result, expected)


def test_never_looks_at_the_present_length_where_more_tokens_only_harm():
    """A case, found by looking for it, in which the largest possible length would end the search too early."""
    case = Case("mqa", 0, 8, eos=tuple(range(4, 61, 6)), width=3, length_penalty=-1.0, early_stopping="never")
    result = ours(case)
    assert result.smallest_gap > CLEAR
    check(case, result, theirs(case))


@pytest.mark.parametrize(("shapes", "num_prompts"), MATRICES)
def test_nearly_every_case_is_clear(shapes, num_prompts):
    gaps = [result.smallest_gap for _, result, _ in compared(shapes, num_prompts)]
    assert sum(gap > CLEAR for gap in gaps) >= 0.95 * len(gaps)


@pytest.mark.parametrize(("shapes", "num_prompts"), MATRICES)
def test_ends_of_sequence_occur_inside_the_beams_and_just_outside(shapes, num_prompts):
    results = [result for _, result, _ in compared(shapes, num_prompts)]
    reasons = [{one.reason for one in result.found} for result in results]
    assert sum(result.ended_inside > 0 for result in results) >= 0.8 * len(results)
    assert sum(result.ended_outside > 0 for result in results) >= 0.5 * len(results)
    assert sum(reason == {"stop"} for reason in reasons) >= 0.2 * len(results)
    assert sum(reason == {"stop", "length"} for reason in reasons) >= 0.2 * len(results)


@pytest.mark.parametrize("setting", ["width", "length_penalty", "early_stopping"])
def test_every_setting_changes_some_answers(setting):
    """Otherwise agreement would say nothing about it."""
    answers = {}
    for case, result, _ in compared(*MATRICES[0].values):
        alike = case._replace(**{setting: None})
        answers.setdefault(alike, set()).add(str([one.tokens for one in result.found[:2]]))
    assert sum(len(different) > 1 for different in answers.values()) >= 10


def test_three_values_of_early_stopping_give_three_answers():
    answers = {}
    for case, result, _ in compared(*MATRICES[0].values):
        answers.setdefault(case._replace(early_stopping=None), set()).add(str(result.found))
    assert max(len(different) for different in answers.values()) == 3
