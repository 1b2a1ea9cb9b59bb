"""A draw from a row of scores: the law, the cuts, and the rows that cannot be drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reference.sampling_reference import Law, draw, margin, philox4x32, probabilities, token_uniform
from specdec_ext import _core, _core_testing

LAWS = [
    Law(1.0),
    Law(0.3),
    Law(2.5),
    Law(1.0, top_k=1),
    Law(0.8, top_k=7),
    Law(1.3, top_k=400),
    Law(1.0, top_p=0.9),
    Law(0.6, top_p=0.35),
    Law(3.0, top_p=0.999),
    Law(1.0, min_p=0.05),
    Law(1.0, top_k=40, top_p=0.95),
    Law(0.7, top_k=20, top_p=0.8, min_p=0.02),
    Law(1.5, top_p=0.7, min_p=0.01),
]


def rows(rng: np.random.Generator, vocab: int) -> list[np.ndarray]:
    """Rows of every character: peaked, flat, with ties, with forbidden tokens, all equal."""
    normal = rng.normal(0, 4, vocab).astype(np.float32)
    ties = np.round(rng.normal(0, 2, vocab)).astype(np.float32)
    forbidden = rng.normal(0, 3, vocab).astype(np.float32)
    forbidden[rng.random(vocab) < 0.5] = -np.inf
    forbidden[rng.integers(vocab)] = 1.0
    peaked = rng.normal(0, 1, vocab).astype(np.float32)
    peaked[rng.integers(vocab)] = 40.0
    return [normal, ties, forbidden, peaked, np.zeros(vocab, np.float32), normal * 30]


def test_philox_is_the_published_one() -> None:
    # Known answers of the Random123 distribution.
    assert philox4x32((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for seed, position in [(0, 0), (1, 7), (2**64 - 1, 2**40 + 3), (0x123456789ABCDEF, 128_000)]:
        assert _core_testing.token_uniform(seed, position) == token_uniform(seed, position)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 300, 1000])
def test_draws_equal_the_definition(law: Law, vocab: int) -> None:
    rng = np.random.default_rng([vocab, LAWS.index(law)])
    near = 0
    for row in rows(rng, vocab):
        for u in [0.0, 1.0 - 2.0**-53, *rng.random(40)]:
            got = _core_testing.sample_token(row, u, **law.options())
            assert probabilities(row, law)[got] > 0
            if got != draw(row, law, u):
                # The first and the last u lie on a step of the function up to rounding: of weights
                # to the grid of 2^-43 (a token below it has none), of sums.
                near += u not in (0.0, 1.0 - 2.0**-53)
                assert margin(row, law, u) < 1e-5
    assert near <= 2  # of 240; a float32 weight is off by up to 1e-6


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_every_token_gets_its_share_of_the_unit_interval(law: Law) -> None:
    """Over a grid of u the counts are the law itself: no statistics needed."""
    rng = np.random.default_rng(5)
    grid = 20_000
    row = rng.normal(0, 2, 120).astype(np.float32)
    tokens = [
        _core_testing.sample_token(row, (i + 0.5) / grid, **law.options()) for i in range(grid)
    ]
    counts = np.bincount(tokens, minlength=len(row))
    assert np.abs(counts - grid * probabilities(row, law)).max() <= 1.1


def test_ties_stay_in_top_k_and_fall_by_id_in_top_p() -> None:
    row = np.array([1, 3, 3, 3, 0], np.float32)
    drawn = {
        _core_testing.sample_token(row, u, temperature=1.0, top_k=2)
        for u in np.linspace(0, 0.999, 99)
    }
    assert drawn == {1, 2, 3}
    drawn = {
        _core_testing.sample_token(row, u, temperature=1.0, top_p=0.5)
        for u in np.linspace(0, 0.999, 99)
    }
    assert drawn == {1, 2}


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    row = np.array([0, 5, -3, 4.99], np.float32)
    drawn = {
        _core_testing.sample_token(row, u, temperature=temperature)
        for u in np.linspace(0, 0.999, 99)
    }
    assert drawn == ({1} if temperature < 1 else {0, 1, 2, 3})


def test_rows_without_a_draw() -> None:
    for bad in (np.nan, np.inf):
        row = np.zeros(100, np.float32)
        row[99] = bad
        assert _core_testing.sample_token(row, 0.5, temperature=1.0, top_k=3) == -1
    row = np.full(70, -np.inf, np.float32)
    assert _core_testing.sample_token(row, 0.5, temperature=1.0) == -2
    row[69] = -1e30
    assert _core_testing.sample_token(row, 0.0, temperature=1.0, top_p=0.1) == 69


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"u": 1.0}, "u = 1"),
        ({"temperature": 0.0}, "temperature = 0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0"),
        ({"min_p": 1.5}, "min_p = 1.5"),
    ],
)
def test_refusals(options: dict[str, float], text: str) -> None:
    arguments = {"u": 0.5, "temperature": 1.0, **options}
    with pytest.raises(ValueError, match=text):
        _core_testing.sample_token(np.zeros(3, np.float32), **arguments)


def test_a_vocabulary_beyond_exact_sums_is_refused() -> None:
    pages = torch.zeros(1, 2, 1, 16, 8)
    with pytest.raises(ValueError, match="vocab_size = 1048577: at most 1048576 tokens"):
        _core.Executor(
            pages, pages.clone(), vocab_size=2**20 + 1, max_batch_size=1, max_seq_len=8,
            max_num_tokens=8, method="none",
        )  # fmt: skip
