"""Any logits, any combination of fields: the sampler agrees with its slow twin in set, probabilities and draw."""

from __future__ import annotations

import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from minipaged.step import Sample, SamplingRules
from minipaged.worker.candidates import scale, survivors
from minipaged.worker.logits import apply_rules
from minipaged.worker.sampler import sample
from tests.unit.sampling import slow_twin


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], Sample]:
    """Logits of a small vocabulary, often with ties, and a request whose fields are each off or on."""
    size = draw(st.integers(1, 10))
    logit = st.integers(-6, 6).map(float) | st.floats(-30, 30)
    logits = draw(st.lists(logit, min_size=size, max_size=size))
    ids = st.integers(0, size - 1)
    several = st.lists(ids, max_size=5).map(tuple)
    rules = SamplingRules(
        temperature=draw(st.sampled_from((1.0, 0.0)) | st.floats(0.05, 5)),
        top_k=draw(st.just(0) | st.integers(1, 12)),
        top_p=draw(st.just(1.0) | st.floats(0.01, 1)),
        min_p=draw(st.just(0.0) | st.floats(0, 1)),
        repetition_penalty=draw(st.just(1.0) | st.floats(0.3, 3)),
        frequency_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        presence_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        logit_bias=tuple(draw(st.dictionaries(ids, st.floats(-100, 100), max_size=2)).items()),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, unique=True).map(tuple)),
        bad_words=draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)),
        min_tokens=draw(st.integers(0, 3)),
        end_token_ids=draw(several),
    )
    output = draw(several)
    place = (draw(st.integers(-(2**63), 2**63 - 1)), len(output))
    return logits, Sample(0, (place,), rules, False, draw(several), output)


@given(cases())
def test_what_can_be_drawn_and_how_likely_equals_the_slow_twin(case):
    logits, request = case
    rules = [request.rules]
    assume(request.rules.temperature > 0)
    expected, margin = slow_twin.distribution(logits, request)
    assume(margin > 1e-9)
    shaped = apply_rules(torch.tensor([logits], dtype=torch.float64), [request])
    values, ids = survivors(scale(shaped, rules), rules)
    kept = values[0] > -math.inf
    found = dict(zip(ids[0][kept].tolist(), values[0][kept].softmax(-1).tolist(), strict=True))
    expected = {v: p for v, p in expected.items() if p > 1e-300}  # a weight that underflows to 0 is never drawn
    assert found.keys() >= expected.keys()
    assert all(abs(p - expected.get(v, 0.0)) < 1e-12 for v, p in found.items())
    assert all(p < 1e-300 for v, p in found.items() if v not in expected)


@given(cases())
def test_the_token_drawn_is_the_one_that_the_slow_twin_draws(case):
    logits, request = case
    ((draw,),) = sample(torch.tensor([logits], dtype=torch.float64), [request])
    if request.rules.temperature == 0:
        shaped = slow_twin.processed_logits(logits, request)
        best, second = (sorted(shaped, reverse=True) + [-math.inf])[:2]
        assume(best == second or best - second > 1e-9)
        assert draw.token_id == shaped.index(best)
        return
    expected, margin = slow_twin.distribution(logits, request)
    assume(margin > 1e-9)
    ((seed, position),) = request.draws
    score = {v: math.log(p) + slow_twin.gumbel(seed, position, v) for v, p in expected.items() if p > 0}
    assert draw.token_id == max(score, key=score.__getitem__)


@given(cases(), st.integers(0, 3), st.integers(0, 3))
def test_neighbours_in_the_batch_change_no_draw(case, before, after):
    logits, request = case
    row = torch.tensor([logits], dtype=torch.float64)
    others = [SamplingRules(top_k=1), SamplingRules(top_p=0.3), SamplingRules(temperature=0.0), SamplingRules()]
    requests = [Sample(0, ((i, i),), others[i]) for i in range(before)]
    requests += [request, *(Sample(0, ((i, 9),), others[-i]) for i in range(after))]
    together = sample(row.expand(len(requests), -1), requests)
    assert together[before] == sample(row, [request])[0]
