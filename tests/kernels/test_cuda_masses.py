"""The integers that rows of scores and drafts' probabilities are summed to (cpp/algo/law_mass.h),
bit for bit: draws hardly depend on the last ones."""

from __future__ import annotations

import numpy as np
import pytest
from accept_cases import Drafted, accept
from accept_scratch import known_of, scratch_for, totals_of
from cuda_calls import ON_CUDA, ON_EMU_FAST, Target, checked

from reference.sampling_reference import Law

F = np.float32
UNIT = 2.0**43


def exact_masses(scores: np.ndarray, temperature: float) -> np.ndarray:
    """softmax_weight() on the grid, in units of it; each product and sum rounds alone."""
    best = scores.max()
    with np.errstate(all="ignore"):
        z = np.where(scores == best, F(0), (scores - best) * (F(1) / F(temperature)))
    bounded = np.maximum(z, F(-87))
    n = np.trunc(bounded * F(1.44269504) - F(0.5))
    r = (bounded - n * F(0.693359375)) + n * F(2.12194440e-4)
    p = np.full_like(r, F(1 / 720))
    for term in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = p * r + F(term)
    weight = np.where(z < F(-87), F(0), np.ldexp(p, n.astype(np.int32)))
    assert weight.dtype == F
    return np.rint(weight.astype(np.float64) * UNIT).astype(np.int64)  # ties to even


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", [2048, 2300])
@checked
def test_masses_of_rows(target: Target, vocab: int, seed: int) -> None:
    """Weights from 1 to below the grid, equal scores, temperatures down to one whose inverse is no
    number; rows that begin at 16 bytes and anywhere."""
    rng = np.random.default_rng([vocab, seed])
    requests = []
    for temperature in [1e-40, 1e-38, 1e-30, 0.05, 0.7, 1.0, 1.3, 40.0]:
        scores = rng.permutation(-np.linspace(0, 34, vocab)).astype(F)[None]
        scores[0, rng.integers(vocab, size=9)] = rng.choice([0.0, -0.0, -1e30, -1.0])
        requests.append(
            Drafted([0], [-1], scores, Law(temperature), int(rng.integers(2**60)), 3,
                    "exact_match", (0.09, 0.3, 1.0), None, False)
        )  # fmt: skip
    scratch = scratch_for(target, requests)
    assert all(a.status == 0 for a in accept(target, requests, rng, workspace=scratch))
    want = [int(exact_masses(r.scores[0], r.law.temperature).sum()) for r in requests]
    assert [row for (row,) in totals_of(scratch, requests)] == want


@pytest.mark.parametrize("target", [ON_EMU_FAST, ON_CUDA])
def test_masses_of_drafts_of_which_a_block_has_many_chunks(target: Target) -> None:
    """So many rows that a block has 25 chunks of one: a warp reads four before it adds, of rows
    that begin at 16 bytes, and one by one of the others."""
    rng = np.random.default_rng(7)
    vocab, count = 6405, 67
    tiny = np.geomspace(1e-45, 2.0**-11, vocab).astype(F)
    requests = []
    for seed in range(count):
        probs = np.zeros((2, vocab), F)
        probs[1] = rng.permutation(tiny)
        probs[1, 0] = F(1.0 - probs[1, 1:].astype(np.float64).sum())
        requests.append(
            Drafted([7, 0], [-1, 0], rng.normal(0, 1, (2, vocab)).astype(F), Law(1.0), seed, 3,
                    "rejection", (0.09, 0.3, 1.0), probs, False)
        )  # fmt: skip
    scratch = scratch_for(target, requests)
    got = accept(target, requests, rng, workspace=scratch, form="drafts")
    assert all(a.status == 0 for a in got)
    for r, known in zip(requests, known_of(scratch, requests), strict=True):
        assert r.probs is not None
        want = np.rint(r.probs[1].astype(np.float64) * UNIT).astype(np.int64)
        assert known[1].mass == int(want.sum())
