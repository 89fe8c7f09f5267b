"""One draw at a time: greedy, ties, masks, penalties, and that a draw depends on nothing but its own row and noise."""

from __future__ import annotations

import math

import pytest
import torch

from minipaged.step import Sample, SamplingRules
from minipaged.worker.candidates import contenders, scale, survivors
from minipaged.worker.logits import apply_rules
from minipaged.worker.noise import gumbel
from minipaged.worker.sampler import sample

GREEDY = SamplingRules(temperature=0.0)
MIXED_RULES = [
    SamplingRules(),
    GREEDY,
    SamplingRules(temperature=0.7, top_p=0.8),
    SamplingRules(top_k=3),
    SamplingRules(min_p=0.2, num_logprobs=2),
    SamplingRules(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5),
    SamplingRules(allowed_token_ids=(1, 5, 9), top_p=0.9),
    SamplingRules(top_k=4, top_p=0.7, temperature=1.5),
]


def random_logits(rows: int, vocab: int = 40, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(logits, *requests: Sample) -> list[int]:
    """The first token that each request draws."""
    return [draws[0].token_id for draws in sample(torch.as_tensor(logits), requests)]


def greedy(logits: list[float], position: int = 0, prompt=(), output=(), **fields) -> int:
    rules = SamplingRules(temperature=0.0, **fields)
    (token_id,) = tokens([logits], Sample(0, ((0, position),), rules, False, tuple(prompt), tuple(output)))
    return token_id


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id():
    assert greedy([0.0, 2.0, 1.0, 2.0]) == 1
    assert greedy([5.0] * 100) == 0


def test_a_temperature_just_below_the_border_is_greedy_and_the_border_itself_draws():
    near_tie = [[1.0, 1.0 + 1e-6]]
    drawn = {tokens(near_tie, Sample(0, ((seed, 0),), SamplingRules(temperature=1e-5)))[0] for seed in range(50)}
    taken = {tokens(near_tie, Sample(0, ((seed, 0),), SamplingRules(temperature=9.9e-6)))[0] for seed in range(50)}
    assert drawn == {0, 1}
    assert taken == {1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 1e300])
def test_no_temperature_overflows(dtype, temperature):
    rules = SamplingRules(temperature=temperature, allowed_token_ids=(1, 2))
    logits = torch.tensor([[6e4, 5e4, -6e4, 1.0]], dtype=dtype)
    assert tokens(logits, Sample(0, ((3, 0),), rules))[0] in ((1, 2) if temperature > 1e4 else (1,))
    assert tokens(logits, Sample(0, ((3, 0),), SamplingRules(temperature=min(temperature, 1.0)))) == [0]


def test_the_hottest_temperature_draws_no_masked_token():
    rules = SamplingRules(temperature=1e300, allowed_token_ids=(5, 700))
    request = Sample(0, tuple((seed, 0) for seed in range(30)), rules)
    (drawn,) = sample(random_logits(1, 20_000).float(), [request])
    assert {draw.token_id for draw in drawn} == {5, 700}


def test_allowed_ids_mask_all_others():
    assert greedy([9.0, 1.0, 3.0, 2.0], allowed_token_ids=(1, 3)) == 3


def test_a_bad_word_masks_its_last_token_only_where_the_output_ends_with_the_rest():
    logits = [9.0, 8.0, 7.0, 6.0]
    assert greedy(logits, bad_words=((0,),)) == 1
    assert greedy(logits, output=(2, 3), bad_words=((2, 3, 0),)) == 1
    assert greedy(logits, output=(2, 3, 1), bad_words=((2, 3, 0),)) == 0
    assert greedy(logits, output=(3,), bad_words=((2, 3, 0),)) == 0
    assert greedy(logits, prompt=(2, 3), bad_words=((2, 3, 0),)) == 0  # the prompt does not count
    assert greedy(logits, prompt=(2,), output=(3,), bad_words=((2, 3, 0),)) == 0


def test_end_tokens_are_masked_until_min_tokens_exist():
    logits = [9.0, 8.0, 7.0]
    masked = [greedy(logits, position, min_tokens=2, end_token_ids=(0, 1)) for position in range(4)]
    assert masked == [2, 2, 0, 0]


def test_a_bias_moves_only_its_own_tokens():
    assert greedy([1.0, 2.0, 3.0], logit_bias=((0, 2.5), (2, -100.0))) == 0


def test_repetition_penalty_reads_the_prompt_and_the_output():
    assert greedy([4.0, 3.0], prompt=(0,), repetition_penalty=2.0) == 1
    assert greedy([4.0, 3.0], output=(0,), repetition_penalty=2.0) == 1
    assert greedy([-1.0, -1.5], prompt=(0,), repetition_penalty=2.0) == 1  # negative logits are multiplied
    assert greedy([3.0, 4.0], prompt=(0,), repetition_penalty=0.5) == 0  # below 1 it encourages


def test_presence_and_frequency_penalties_do_not_read_the_prompt():
    assert greedy([4.0, 3.0], prompt=(0, 0), presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert greedy([4.0, 3.0], output=(0,), presence_penalty=2.0) == 1


def test_frequency_counts_and_presence_does_not():
    assert greedy([4.0, 3.0], output=(0, 0, 0), frequency_penalty=0.4) == 1
    assert greedy([4.0, 3.0], output=(0, 0, 0), presence_penalty=0.4) == 0


def test_negative_penalties_encourage():
    assert greedy([3.0, 4.0], output=(0,), presence_penalty=-1.5) == 0
    assert greedy([3.0, 4.0], output=(0, 0), frequency_penalty=-1.0) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token_give_way_to_the_allowed_ids(temperature):
    nothing_left = [
        SamplingRules(temperature=temperature, allowed_token_ids=(2,), bad_words=((2,),)),
        SamplingRules(temperature=temperature, allowed_token_ids=(2,), min_tokens=5, end_token_ids=(2,), top_p=0.5),
        SamplingRules(temperature=temperature, bad_words=((0,), (1,), (2,), (3,)), logit_bias=((2, 100.0),)),
    ]
    requests = [Sample(row, ((1, 0),), rules) for row, rules in enumerate(nothing_left)]
    assert tokens(random_logits(3, 4), *requests) == [2, 2, 2]


@pytest.mark.parametrize("penalty", [1e300, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absurd_penalties_neither_crash_nor_lift_a_mask(penalty, dtype):
    rules = SamplingRules(repetition_penalty=penalty, bad_words=((1,),), frequency_penalty=2.0)
    logits = torch.tensor([[1e10, 5.0, -3.0, -1e10]], dtype=dtype)
    request = Sample(0, tuple((seed, 1) for seed in range(20)), rules, False, (0, 1, 2, 3), (1, 2))
    shaped = apply_rules(logits, [request])
    assert torch.isfinite(shaped[0, [0, 2, 3]]).all()
    assert shaped[0, 1] == -math.inf
    assert {draw.token_id for draw in sample(logits, [request])[0]} <= {0, 2, 3}


def test_the_callers_logits_are_never_changed():
    logits = random_logits(len(MIXED_RULES))
    before = logits.clone()
    sample(logits, [Sample(i, ((i, 2),), rules, False, (1, 2), (3, 4)) for i, rules in enumerate(MIXED_RULES)])
    assert torch.equal(logits, before)


def kept_ids(logits: list[float], rules: SamplingRules) -> list[int]:
    values, ids = survivors(scale(torch.tensor([logits]), [rules]), [rules])
    return ids[values > -math.inf].tolist()


def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids():
    assert kept_ids([1.0, 2.0, 1.0, 1.0], SamplingRules(top_k=2)) == [1, 0]


def test_top_p_is_a_share_of_what_top_k_left():
    assert kept_ids([1.0, 0.0, 0.0, 0.0], SamplingRules(top_k=2, top_p=0.7)) == [0]
    assert kept_ids([1.0, 0.0, 0.0, 0.0], SamplingRules(top_k=2, top_p=0.74)) == [0, 1]
    assert kept_ids([5.0] + [0.0] * 999, SamplingRules(top_k=2, top_p=0.994)) == [0, 1]


def test_top_p_is_satisfied_by_a_mass_that_equals_it():
    assert kept_ids([3.0] * 4, SamplingRules(top_p=0.5)) == [0, 1]


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
def test_top_p_keeps_the_smallest_sufficient_set_of_a_large_vocabulary(spread):
    logits = random_logits(5, 3000) / 3 * spread
    for top_p in (0.01, 0.5, 0.9, 0.999):
        rules = [SamplingRules(top_p=top_p)] * 5
        values, ids = survivors(scale(logits, rules), rules)
        probabilities, order = logits.softmax(-1).sort(descending=True)
        sizes = (probabilities.cumsum(-1) < top_p).sum(-1) + 1
        for row, size in enumerate(sizes.tolist()):
            assert ids[row][values[row] > -math.inf].tolist() == order[row, :size].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_of_a_row_do_not_depend_on_its_neighbours(dtype):
    logits = random_logits(4, 500).to(dtype)
    rules = [
        SamplingRules(top_k=7),
        SamplingRules(top_p=0.6),
        SamplingRules(min_p=0.1),
        SamplingRules(top_k=3, top_p=0.5),
    ]
    values, ids = survivors(scale(logits, rules), rules)
    for row, rule in enumerate(rules):
        alone_values, alone_ids = survivors(scale(logits[row : row + 1], [rule]), [rule])
        kept, alone = values[row] > -math.inf, alone_values[0] > -math.inf
        assert ids[row][kept].tolist() == alone_ids[0][alone].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_is_the_same_alone_in_a_batch_and_in_any_order(dtype):
    rows = len(MIXED_RULES) * 3
    logits = random_logits(rows, 300).to(dtype)
    requests = [
        Sample(i, ((i * i, i),), MIXED_RULES[i % len(MIXED_RULES)], False, (1, 2, 3), tuple(range(i)))
        for i in range(rows)
    ]
    together = sample(logits, requests)
    alone = [sample(logits[i : i + 1], [requests[i]])[0] for i in range(rows)]
    backwards = sample(logits.flip(0), requests[::-1])[::-1]
    token_ids = [[draw.token_id for draw in draws] for draws in together]
    assert token_ids == [[draw.token_id for draw in draws] for draws in alone]
    assert token_ids == [[draw.token_id for draw in draws] for draws in backwards]


@pytest.mark.parametrize("rules", MIXED_RULES)
def test_sample_i_draws_what_a_request_of_its_own_with_seed_plus_i_draws(rules):
    logits = random_logits(1, 300)
    seeds = [2**63 - 2 + i for i in range(5)]  # beyond 2^63 they wrap
    (several,) = sample(logits, [Sample(0, tuple((seed, 0) for seed in seeds), rules)])
    single = [sample(logits, [Sample(0, ((seed, 0),), rules)])[0][0] for seed in seeds]
    assert list(several) == single
    assert sample(logits, [Sample(0, ((-(2**63), 0),), rules)])[0][0] == single[2]


def test_masking_other_tokens_does_not_change_a_draw():
    logits = random_logits(1, 30)
    for seed in range(40):
        (drawn,) = tokens(logits, Sample(0, ((seed, 4),), SamplingRules()))
        others = tuple((v,) for v in range(30) if v != drawn and v % 3)
        assert tokens(logits, Sample(0, ((seed, 4),), SamplingRules(bad_words=others))) == [drawn]
        assert tokens(logits, Sample(0, ((seed, 4),), SamplingRules(allowed_token_ids=(drawn, 0)))) == [drawn]


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 30.0])
def test_leaving_out_tokens_that_cannot_win_changes_no_draw(spread):
    logits = random_logits(200, 2000) / 3 * spread
    seeds, positions = torch.arange(200), torch.arange(200) % 7
    scaled = scale(logits, [SamplingRules()] * 200)
    values, ids = contenders(scaled, seeds, positions)
    winners = ids.gather(1, (values + gumbel(seeds, positions, ids)).argmax(-1, keepdim=True))[:, 0]
    everything = (scaled + gumbel(seeds, positions, torch.arange(2000))).argmax(-1)
    assert winners.tolist() == everything.tolist()
    if spread == 3.0:
        assert (values > -math.inf).sum() < 0.6 * logits.numel()  # and it does leave out some


def test_a_batch_larger_than_one_chunk_draws_the_same(monkeypatch):
    logits = random_logits(16, 50)
    requests = [Sample(i, ((i, i),), MIXED_RULES[i % len(MIXED_RULES)]) for i in range(16)]
    whole = sample(logits, requests)
    monkeypatch.setattr("minipaged.worker.logprobs.CHUNK", 150)
    assert sample(logits, requests) == whole


def test_float32_and_float64_draw_alike_away_from_ties():
    logits = random_logits(300, 100).float()
    requests = [Sample(i, ((i, 0),), MIXED_RULES[i % len(MIXED_RULES)]) for i in range(300)]
    assert tokens(logits, *requests) == tokens(logits.double(), *requests)


def test_float64_logits_are_never_cast_down():
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert tokens(logits, Sample(0, ((0, 0),), GREEDY)) == [1]
    assert tokens(logits, Sample(0, ((0, 0),), SamplingRules(top_k=1))) == [1]


@pytest.mark.parametrize("vocab_size", [1, 61, 256, 96 * 256])
def test_greedy_takes_the_lowest_id_of_equals_in_any_vocabulary(vocab_size):
    torch.manual_seed(0)
    logits = torch.randint(0, 5, (9, vocab_size)).float()
    drawn = sample(logits, [Sample(row, ((0, 0),), SamplingRules(temperature=0.0)) for row in range(9)])
    assert [draws[0].token_id for draws in drawn] == logits.argmax(-1).tolist()
