"""Beam search: equal to the long way (tests/beam_oracle.py) on made-up models, and single scenes of its rules.

First whole searches, then single steps, then the parameters.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace
from math import exp, log

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minipaged.beam_search_params import BeamSearchParams
from minipaged.decoding.beam_search import Beam, BeamRules, BeamState, Hypothesis, advance, cut_off
from minipaged.errors import InvalidParameter
from minipaged.step import TokenLogprob
from tests.beam_oracle import beam_search

EOS = 0


def made_up_logprobs(seed: int, vocab_size: int, levels: int, tokens: tuple[int, ...]) -> list[float]:
    """A model: after any tokens the same log-probabilities, of which few levels make many equal."""
    rng = random.Random(f"{seed} {tokens}")
    logits = [rng.randrange(levels) * 4 / levels for _ in range(vocab_size)]
    total = log(sum(map(exp, logits)))
    return [logit - total for logit in logits]


def best_tokens(logprobs: list[float], count: int) -> list[TokenLogprob]:
    """What a worker answers: the best tokens, equals by lowest id."""
    order = sorted(range(len(logprobs)), key=lambda token_id: (-logprobs[token_id], token_id))
    return [TokenLogprob(token_id, logprobs[token_id], rank) for rank, token_id in enumerate(order[:count], 1)]


def run(logprobs, rules: BeamRules, steps: int | None = None) -> BeamState:
    """A search as an engine runs it: it owns the sequences, and follows the verdicts by fork and append."""
    state = BeamState()
    sequences = [[]]
    while not state.is_over and steps != 0:
        state = advance(state, [best_tokens(logprobs(tokens), rules.num_candidates) for tokens in sequences], rules)
        sequences = [[*sequences[beam.parent], beam.token_ids[-1]] for beam in state.running]
        assert sequences == [list(beam.token_ids) for beam in state.running]
        steps = None if steps is None else steps - 1
    return state


@st.composite
def searches(draw):
    """A made-up model and the rules of a search on it."""
    seed, vocab_size, levels = draw(st.integers(0, 10**6)), draw(st.integers(2, 12)), draw(st.sampled_from([3, 10**6]))
    rules = BeamRules(
        beam_width=draw(st.integers(1, 5)),
        max_tokens=draw(st.integers(1, 9)),
        eos_token_ids=tuple(range(draw(st.integers(0, min(3, vocab_size - 1))))),
        length_penalty=draw(st.sampled_from([1.0, 0.5, 2.0, 0.0, -1.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
    )
    return (lambda tokens: made_up_logprobs(seed, vocab_size, levels, tuple(tokens))), rules


@settings(max_examples=4 * settings.default.max_examples)
@given(searches())
def test_a_search_finds_exactly_what_the_oracle_finds(search):
    logprobs, rules = search
    expected = beam_search(
        logprobs, rules.beam_width, rules.max_tokens, rules.eos_token_ids, rules.length_penalty, rules.early_stopping
    )
    finished = run(logprobs, rules).finished
    assert [(h.score, h.cumulative_logprob, list(h.token_ids), h.finish_reason) for h in finished] == expected.found


@given(searches())
def test_one_beam_is_greedy_search_whatever_early_stopping_says(search):
    logprobs, rules = search
    greedy = []
    while len(greedy) < rules.max_tokens and (not greedy or greedy[-1] not in rules.eos_token_ids):
        greedy.append(best_tokens(logprobs(greedy), 1)[0].token_id)
    [hypothesis] = run(logprobs, replace(rules, beam_width=1)).finished
    assert list(hypothesis.token_ids) == greedy


@given(searches(), st.integers(1, 8))
def test_a_search_cut_off_is_a_search_with_that_limit(search, steps):
    logprobs, rules = search
    state = run(logprobs, replace(rules, max_tokens=9), steps)
    assume(not state.is_over)
    limited = run(logprobs, replace(rules, max_tokens=steps))
    assert [h.score for h in cut_off(state, rules).finished] == [h.score for h in limited.finished]


@given(searches())
def test_the_number_of_candidates_is_enough(search):
    """More of them would change nothing: whatever ends, k are left to run on."""
    logprobs, rules = search
    state = BeamState()
    while not state.is_over:
        after = [logprobs(beam.token_ids) for beam in state.running]
        few = advance(state, [best_tokens(one, rules.num_candidates) for one in after], rules)
        assert few == advance(state, [best_tokens(one, len(one)) for one in after], rules)
        state = few


def rules_of(beam_width=2, max_tokens=10, eos=(EOS,), **changes) -> BeamRules:
    return BeamRules(beam_width, max_tokens, eos, **changes)


def beams(*logprobs: float) -> tuple[Beam, ...]:
    """Running beams of one token: beam i has generated token 10 + i."""
    return tuple(Beam((10 + i,), logprob, 0) for i, logprob in enumerate(logprobs))


def ranked(proposed: dict[int, float]) -> list[TokenLogprob]:
    """{token id: log-probability}, given best first, as a worker answers it."""
    return [TokenLogprob(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(proposed.items(), 1)]


def step(running: tuple[Beam, ...], *proposed: dict[int, float], finished=(), **changes) -> BeamState:
    """The step in which the running beams get their second token, from what each of them proposes."""
    return advance(BeamState(running, tuple(finished)), [ranked(one) for one in proposed], rules_of(**changes))


def found(score: float, *token_ids: int) -> Hypothesis:
    return Hypothesis(token_ids, score * len(token_ids), score, "stop")


def test_the_first_step_makes_k_beams_of_one():
    state = advance(BeamState(), [ranked({5: -0.1, 7: -0.2, 3: -0.3})], rules_of())
    assert state.running == (Beam((5,), -0.1, 0), Beam((7,), -0.2, 0))


def test_as_in_figure_9_all_new_beams_may_come_from_two_of_four_and_the_others_have_no_child():
    high, low = {1: -0.1, 2: -0.2}, {1: -5.0, 2: -6.0}
    state = step(beams(-1, -1.05, -1.5, -2), low, high, high, low, beam_width=4)
    assert [(beam.parent, beam.token_ids[-1]) for beam in state.running] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_beam_that_finishes_does_not_make_the_search_narrower():
    state = step(beams(-1, -2), {EOS: -0.1, 5: -3.0}, {6: -0.1, 7: -0.2})
    assert [hypothesis.token_ids for hypothesis in state.finished] == [(10, EOS)]
    assert [beam.token_ids for beam in state.running] == [(11, 6), (11, 7)]


def test_k_beams_run_on_even_if_the_best_k_proposals_all_end():
    ends_first, ends_second = {0: -0.1, 1: -0.2, 5: -3.0}, {0: -0.3, 6: -4.0}
    state = step(beams(-1, -1), ends_first, ends_second, eos=(0, 1), early_stopping="never")
    assert [hypothesis.token_ids for hypothesis in state.finished] == [(10, 0), (10, 1)]
    assert [beam.token_ids for beam in state.running] == [(10, 5), (11, 6)]


def test_an_end_that_is_not_among_the_k_best_is_dropped():
    state = step(beams(-1, -1), {5: -0.1, 6: -0.2, EOS: -0.3}, {7: -4.0, 8: -5.0})
    assert state.finished == ()
    assert [beam.token_ids for beam in state.running] == [(10, 5), (10, 6)]


def test_without_end_of_sequence_ids_every_token_runs_on():
    state = step(beams(-1, -2), {EOS: -0.1, 5: -0.2}, {6: -0.3, 7: -0.4}, eos=())
    assert [beam.token_ids for beam in state.running] == [(10, EOS), (10, 5)]


def test_at_the_last_token_the_k_best_finish_and_an_end_among_them_is_a_stop():
    state = step(beams(-1, -2), {5: -0.1, EOS: -0.2, 6: -0.3}, {7: -4.0, 8: -5.0}, max_tokens=2)
    assert [(h.token_ids, h.finish_reason) for h in state.finished] == [((10, 5), "length"), ((10, EOS), "stop")]
    assert state.is_over


def test_a_score_is_the_sum_over_the_generated_length_to_the_penalty():
    for penalty, score in {0.0: -1.5, 1.0: -0.75, 2.0: -0.375, -1.0: -3.0}.items():
        state = step(beams(-1, -9), {EOS: -0.5, 5: -9.0}, {5: -9.0, 6: -9.5}, length_penalty=penalty)
        assert state.finished[0].score == pytest.approx(score)
        assert state.finished[0].cumulative_logprob == -1.5


def test_a_better_hypothesis_displaces_the_worst_of_k():
    before = [found(-0.8, 20, EOS), found(-0.9, 21, EOS)]
    state = step(beams(-1, -9), {EOS: -0.7, 5: -0.8}, {6: -1.0, 7: -2.0}, finished=before)
    assert [hypothesis.token_ids for hypothesis in state.finished] == [(20, EOS), (10, EOS)]


def test_an_equal_hypothesis_displaces_nothing():
    before = [found(-0.25, 20, EOS), found(-0.75, 21, EOS)]
    state = step(beams(-1, -9), {EOS: -0.5, 5: -0.8}, {6: -1.0, 7: -2.0}, finished=before)
    assert [hypothesis.token_ids for hypothesis in state.finished] == [(20, EOS), (21, EOS)]


def test_equal_sums_stand_by_parent_and_then_by_token_id():
    state = step(beams(-1, -1), {3: -1.0, 9: -1.0}, {2: -1.0, 4: -1.0}, beam_width=4, eos=())
    assert [(beam.parent, beam.token_ids[-1]) for beam in state.running] == [(0, 3), (0, 9), (1, 2), (1, 4)]


def goes_on(leader: float, finished: tuple[float, ...], **changes) -> bool:
    """Whether a search with hypotheses of these scores goes on when its best beam's sum, of two tokens, is this."""
    before = [found(score, 20 + i, EOS) for i, score in enumerate(finished)]
    return not step(beams(leader, -20), {5: 0.0, 6: -9.0}, {5: -1.0}, finished=before, **changes).is_over


@pytest.mark.parametrize(
    ("early_stopping", "leader", "expected"),
    [
        (True, -1.0, False),  # two are finished: enough, though the leader (at -0.5) would beat both
        (False, -1.0, True),
        (False, -1.79, True),
        (False, -1.8, False),  # at its present length it scores -0.9, no better than the worst
        ("never", -1.8, True),  # at 10 tokens it could score -0.18
        ("never", -8.9, True),
        ("never", -9.0, False),  # at best -0.9
    ],
)
def test_when_k_are_finished_early_stopping_says_whether_to_go_on(early_stopping, leader, expected):
    assert goes_on(leader, (-0.8, -0.9), early_stopping=early_stopping) == expected


@pytest.mark.parametrize(("penalty", "worst"), [(0.0, -1.8), (-1.0, -3.6)])
def test_never_takes_the_present_length_where_more_tokens_do_not_flatter(penalty, worst):
    assert goes_on(-1.79, (-0.1, worst), early_stopping="never", length_penalty=penalty)
    assert not goes_on(-1.8, (-0.1, worst), early_stopping="never", length_penalty=penalty)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_with_fewer_than_k_finished_the_search_goes_on(early_stopping):
    assert goes_on(-19.0, (-0.1,), early_stopping=early_stopping)


def test_a_vocabulary_smaller_than_k_runs_fewer_beams_until_there_are_more():
    rules, widths, state = rules_of(beam_width=4, max_tokens=3, eos=()), [], BeamState()
    while not state.is_over:
        state = advance(state, [ranked({0: -0.5, 1: -1.0})] * len(state.running), rules)
        widths.append(len(state.running))
    assert widths == [2, 4, 0]
    assert len(state.finished) == 4


def test_a_search_in_which_everything_ends_is_over_with_what_it_has():
    state = step(beams(-1), {EOS: 0.0}, beam_width=3)
    assert state.is_over
    assert [hypothesis.token_ids for hypothesis in state.finished] == [(10, EOS)]


def test_a_cut_off_search_ranks_what_ran_among_what_was_finished():
    state = BeamState(beams(-0.5, -0.7), (found(-0.6, 20, EOS),))
    cut = cut_off(state, rules_of())
    assert cut.is_over
    assert [(h.token_ids, h.finish_reason) for h in cut.finished] == [((10,), "length"), ((20, EOS), "stop")]


@pytest.mark.parametrize(("num_eos", "count"), [(0, 8), (1, 8), (2, 12)])
def test_each_beam_proposes_as_many_tokens_as_transformers_looks_at(num_eos, count):
    assert rules_of(beam_width=4, eos=tuple(range(num_eos))).num_candidates == count


REFUSED = {
    "beam_width": [0, -1, 2.0, True, None, "4"],
    "max_tokens": [0, -1, 1.5, True, None],
    "ignore_eos": [None, 0, "yes"],
    "temperature": [0.7, -1, float("nan"), None, True],
    "length_penalty": [float("nan"), float("inf"), 10.5, -11, "1", None, True],
    "include_stop_str_in_output": [None, 1],
    "early_stopping": ["always", "True", None, 0, 1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_a_value_that_is_not_allowed_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(InvalidParameter, match=f"^{field} = "):
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 48, field: value})


@pytest.mark.parametrize("field", ["n", "top_p", "seed", "stop", "logprobs", "min_tokens", "structured_outputs"])
def test_an_option_of_sampling_is_refused_by_name(field):
    with pytest.raises(InvalidParameter, match=f"^{field} = .*not an option of beam search"):
        BeamSearchParams(beam_width=4, max_tokens=48, **{field: None})


def test_an_option_that_nobody_knows_is_refused_with_the_one_that_was_meant():
    with pytest.raises(InvalidParameter, match="beam_with = 4: .*did you mean beam_width"):
        BeamSearchParams(beam_with=4, max_tokens=48)


def test_names_order_and_defaults_are_those_of_vllm_with_early_stopping_behind_them():
    names = "beam_width max_tokens ignore_eos temperature length_penalty include_stop_str_in_output early_stopping"
    assert " ".join(field.name for field in fields(BeamSearchParams)) == names
    assert BeamSearchParams(4, 48) == BeamSearchParams(4, 48, False, 0.0, 1.0, False, False)


def test_values_are_kept_in_their_normal_form_and_a_copy_is_checked_again():
    params = BeamSearchParams(np.int64(4), 48, length_penalty=np.float32(0.5))
    assert (type(params.beam_width), type(params.length_penalty)) == (int, float)
    params.beam_width = 0
    with pytest.raises(InvalidParameter, match="beam_width"):
        replace(params)
