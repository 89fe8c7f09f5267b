"""Tokens that were really drawn, 5,000 for each field, against the distribution that the field asks for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from minipaged.step import Sample, SamplingRules
from minipaged.worker.sampler import sample
from tests.unit.sampling import slow_twin

LOGITS = [2.0, 1.5, 1.0, 0.4, 0.0, -0.5, -1.0, 1.2]
DRAWS = 5_000
# Chi-square exceeds this once in 10,000 right samplers, by degrees of freedom. The seeds are fixed: no run differs.
CRITICAL = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}

FIELDS = {
    "nothing": SamplingRules(),
    "temperature 0.5": SamplingRules(temperature=0.5),
    "temperature 2": SamplingRules(temperature=2.0),
    "top_k": SamplingRules(top_k=3),
    "top_p": SamplingRules(top_p=0.8),
    "min_p": SamplingRules(min_p=0.3),
    "all filters": SamplingRules(temperature=1.3, min_p=0.1, top_k=5, top_p=0.9),
    "repetition_penalty": SamplingRules(repetition_penalty=1.7),
    "frequency_penalty": SamplingRules(frequency_penalty=0.6),
    "presence_penalty": SamplingRules(presence_penalty=-1.0),
    "logit_bias": SamplingRules(logit_bias=((3, 2.0), (0, -1.5))),
    "allowed_token_ids": SamplingRules(allowed_token_ids=(1, 4, 6)),
    "bad_words": SamplingRules(bad_words=((1,), (5, 6, 0), (5, 7))),
    "min_tokens": SamplingRules(min_tokens=9, end_token_ids=(0, 2)),
}


@pytest.mark.parametrize("name", FIELDS)
def test_draws_follow_the_distribution_that_the_field_asks_for(name):
    draws = tuple((seed, 2) for seed in range(DRAWS))
    request = Sample(0, draws, FIELDS[name], False, prompt_token_ids=(2, 2, 7), output_token_ids=(5, 6))
    (drawn,) = sample(torch.tensor([LOGITS], dtype=torch.float64), [request])
    counts = Counter(draw.token_id for draw in drawn)
    expected, _ = slow_twin.distribution(LOGITS, request)
    assert counts.keys() <= expected.keys()
    chi_square = sum((counts[v] - DRAWS * p) ** 2 / (DRAWS * p) for v, p in expected.items())
    assert chi_square < CRITICAL[len(expected) - 1]


def test_draws_along_one_sequence_follow_it_too():
    """The seed stays and the position moves, as it does for the tokens of one output."""
    draws = tuple((7, position) for position in range(DRAWS))
    (drawn,) = sample(torch.tensor([LOGITS]), [Sample(0, draws, SamplingRules())])
    counts = Counter(draw.token_id for draw in drawn)
    expected, _ = slow_twin.distribution(LOGITS, Sample(0, draws, SamplingRules()))
    assert sum((counts[v] - DRAWS * p) ** 2 / (DRAWS * p) for v, p in expected.items()) < CRITICAL[7]
