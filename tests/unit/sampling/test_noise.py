"""The hash behind every draw: published test vectors, a plain-Python twin, and no relation between neighbours."""

from __future__ import annotations

import math

import torch

from minipaged.worker.noise import GAMMA, gumbel, random_bits, splitmix64
from tests.unit.sampling import slow_twin

PUBLISHED = {
    1234567: (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ),
    0: (16294208416658607535, 7960286522194355700, 487617019471545679),
}


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_splitmix64_gives_the_published_outputs():
    for seed, expected in PUBLISHED.items():
        counters = seed + GAMMA * torch.arange(1, len(expected) + 1)
        assert [output % 2**64 for output in splitmix64(counters).tolist()] == list(expected)
        assert slow_twin.splitmix64_outputs(seed, len(expected)) == list(expected)


def test_the_bits_of_three_rows_never_change():
    """A change here changes every seeded text that anyone has kept."""
    bits = random_bits(tensor(0, 42, -7), tensor(0, 3, 100), tensor(0, 1, 49151))
    assert bits.tolist() == [
        [3044905813493120, 2424109978418670, 5501275982339461],
        [3948598546918280, 6135048714300489, 5040639547309993],
        [3433762452207112, 5308176287662195, 7622309860831104],
    ]


def test_bits_equal_those_of_plain_python_for_any_sign_of_the_seed():
    seeds, positions = (0, 1, -1, 2**63 - 1, -(2**63), 123456789), (0, 5, 2**31, 1, 7, 2048)
    bits = random_bits(tensor(*seeds), tensor(*positions), torch.arange(9))
    expected = [[slow_twin.random_bits(s, p, v) for v in range(9)] for s, p in zip(seeds, positions, strict=True)]
    assert bits.tolist() == expected


def test_token_ids_may_differ_from_row_to_row():
    whole = gumbel(tensor(3, 4), tensor(8, 9), torch.arange(50))
    picked = gumbel(tensor(3, 4), tensor(8, 9), torch.tensor([[49, 0, 7], [7, 7, 21]]))
    assert picked.tolist() == [whole[0, [49, 0, 7]].tolist(), whole[1, [7, 7, 21]].tolist()]


def test_noise_is_finite_even_where_all_bits_are_equal(monkeypatch):
    extremes = torch.tensor([[0, 2**53 - 1]])
    monkeypatch.setattr("minipaged.worker.noise.random_bits", lambda *_: extremes.clone())
    low, high = gumbel(tensor(0), tensor(0), tensor(0, 1))[0].tolist()
    assert math.isclose(low, -math.log(53 * math.log(2)))
    assert math.isclose(high, 53 * math.log(2))


def test_noise_has_the_mean_and_variance_of_a_gumbel():
    noise = gumbel(torch.arange(200), torch.arange(200), torch.arange(1000))
    assert noise.dtype == torch.float64
    assert abs(noise.mean() - 0.5772156649) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02


def test_neighbouring_seeds_positions_and_tokens_are_unrelated():
    tokens = torch.arange(20_000)
    rows = random_bits(tensor(5, 6, 5, 4, -5), tensor(5, 5, 6, 6, 5), tokens)
    shifted = torch.stack([rows[0][1:], rows[0][:-1]])  # token v against token v + 1
    for left, right in [*((rows[0], row) for row in rows[1:]), tuple(shifted)]:
        pair = torch.stack([left, right]).double()
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(len(tokens))
    assert len(rows.unique()) == rows.numel()
