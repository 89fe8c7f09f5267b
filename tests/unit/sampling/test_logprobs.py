"""Log-probabilities of the raw logits, ranks, and the most probable tokens in a fixed order."""

from __future__ import annotations

import math

import pytest
import torch

from minipaged.step import Sample, SamplingRules, ScorePrompt
from minipaged.worker.logprobs import best_candidates, score_prompt
from minipaged.worker.sampler import sample

LOGITS = [0.1, 2.0, 0.5, 2.0, 0.5]


def logprob(token_id: int, logits=LOGITS) -> float:
    return logits[token_id] - math.log(sum(math.exp(x) for x in logits))


def one_draw(rules: SamplingRules, logits=LOGITS, **more):
    ((draw,),) = sample(torch.tensor([logits], dtype=torch.float64), [Sample(0, ((0, 0),), rules, **more)])
    return draw


def test_nobody_asked_so_nothing_is_scored():
    draw = one_draw(SamplingRules())
    assert (draw.logprob, draw.best) == (None, ())


def test_zero_logprobs_gives_the_drawn_token_alone():
    draw = one_draw(SamplingRules(temperature=0.0, num_logprobs=0))
    assert draw.best == ()
    assert draw.logprob.token_id == draw.token_id == 1
    assert draw.logprob.logprob == pytest.approx(logprob(1), abs=1e-12)


def test_a_needed_logprob_comes_without_being_listed():
    draw = one_draw(SamplingRules(temperature=0.0), needs_logprob=True)
    assert draw.logprob.rank == 1
    assert draw.best == ()


def test_equals_come_by_lowest_id_and_share_a_rank():
    draw = one_draw(SamplingRules(temperature=0.0, num_logprobs=4))
    assert [(t.token_id, t.rank) for t in draw.best] == [(1, 1), (3, 1), (2, 3), (4, 3)]
    assert [t.logprob for t in draw.best] == pytest.approx([logprob(i) for i in (1, 3, 2, 4)], abs=1e-12)


@pytest.mark.parametrize("asked", [-1, 5, 6, 10**9])
def test_all_logprobs_are_as_many_as_the_vocabulary(asked):
    draw = one_draw(SamplingRules(num_logprobs=asked))
    assert [t.token_id for t in draw.best] == [1, 3, 2, 4, 0]


def test_logprobs_are_of_the_raw_logits_whatever_the_rules_do():
    rules = SamplingRules(
        temperature=0.3, top_k=1, logit_bias=((1, -100.0),), allowed_token_ids=(0, 2), num_logprobs=1, min_p=0.5
    )
    draw = one_draw(rules)
    assert draw.token_id == 2
    assert draw.logprob.logprob == pytest.approx(logprob(2), abs=1e-12)
    assert draw.logprob.rank == 3  # two tokens are strictly more probable
    assert [t.token_id for t in draw.best] == [1]  # the best is listed although it was not drawn


def test_each_row_gets_as_many_as_it_asked_for():
    rules = [SamplingRules(temperature=0.0, num_logprobs=k) for k in (2, None, 0, 2, -1)]
    requests = [Sample(i, ((0, 0),), rule) for i, rule in enumerate(rules)]
    draws = [draws[0] for draws in sample(torch.tensor([LOGITS] * 5), requests)]
    assert [len(draw.best) for draw in draws] == [2, 0, 0, 2, 5]
    assert [draw.logprob is None for draw in draws] == [False, True, False, False, False]


def test_half_logits_are_scored_in_float32():
    wide = torch.randn(1, 2000, generator=torch.Generator().manual_seed(0)).bfloat16()
    request = Sample(0, ((0, 0),), SamplingRules(temperature=0.0, num_logprobs=0))
    ((draw,),) = sample(wide, [request])
    assert draw.logprob.logprob == pytest.approx(wide[0].double().log_softmax(-1).max().item(), abs=1e-5)


def test_best_candidates_are_the_k_best_of_each_row():
    rows = torch.tensor([LOGITS, LOGITS[::-1]], dtype=torch.float64)
    first, second = best_candidates(rows, [3, 1])
    assert [t.token_id for t in first] == [1, 3, 2]
    assert [t.token_id for t in second] == [1]
    assert [t.logprob for t in first] == pytest.approx([logprob(i) for i in (1, 3, 2)], abs=1e-12)
    assert [len(row) for row in best_candidates(rows, [9, 5])] == [5, 5]


def test_a_prompt_is_scored_row_by_row_up_to_its_last_target():
    rows = torch.tensor([LOGITS, LOGITS[::-1], LOGITS], dtype=torch.float64)
    scored = score_prompt(rows, ScorePrompt(0, targets=(2, 0), num_logprobs=2))
    assert [s.target.token_id for s in scored] == [2, 0]
    assert [s.target.rank for s in scored] == [3, 3]
    assert scored[1].target.logprob == pytest.approx(logprob(0, LOGITS[::-1]), abs=1e-12)
    assert [t.token_id for t in scored[0].best] == [1, 3]


def test_a_prompt_longer_than_one_chunk_is_scored_whole(monkeypatch):
    rows = torch.randn(7, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    item = ScorePrompt(0, targets=(3, 1, 4, 1, 5, 9, 2), num_logprobs=3)
    whole = score_prompt(rows, item)
    monkeypatch.setattr("minipaged.worker.logprobs.CHUNK", 22)  # two rows at a time
    assert score_prompt(rows, item) == whole
    assert [s.target.token_id for s in whole] == list(item.targets)
