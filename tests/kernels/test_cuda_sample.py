"""sample_rows on every backend: the token that the host's executor draws, whatever the row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from accept_cases import GREEDY, LAWS, host_token, hostile_row, laws_on, strided
from cuda_calls import (
    CPU,
    NAN,
    ON_CUDA,
    ON_EMU_FAST,
    Target,
    checked,
    every_backend,
    fast,
)
from kernel_calls import int32

from reference.sampling_reference import Law, draw, margin, probabilities, token_uniform
from specdec_ext import ops

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SENTINEL = -7
BAD_LAW = 16
all_fast = pytest.mark.parametrize("target", [pytest.param(CPU, id="cpu"), ON_EMU_FAST, ON_CUDA])


def draw_rows(
    target: Target,
    rows: torch.Tensor,
    laws: list[Law],
    seeds: list[int],
    positions: list[int],
    rng: np.random.Generator,
    **options: object,
) -> tuple[list[int], list[int]]:
    """One row a request: (tokens, status)."""
    count = len(laws)
    out = target.put(torch.full((len(rows),), SENTINEL, dtype=torch.int32))
    status = target.put(torch.zeros(count, dtype=torch.int32))
    ops.sample_rows(
        strided(target, rows, rng),
        target.put(int32(list(range(count + 1)))),
        target.put(int32(positions)),
        laws_on(target, laws, seeds),
        out=out,
        backend=target.backend,
        status=status,
        **options,  # type: ignore[arg-type]
    )
    return out.tolist(), status.tolist()


def check(target: Target, vocab: int, dtype: torch.dtype, count: int, seed: int) -> None:
    rng = np.random.default_rng([vocab, count, seed])
    rows = torch.from_numpy(np.stack([hostile_row(rng, vocab) for _ in range(count)])).to(dtype)
    laws = [GREEDY if rng.random() < 0.05 else LAWS[rng.integers(len(LAWS))] for _ in range(count)]
    seeds = [int(rng.integers(2**63)) * 2 + i % 2 for i in range(count)]
    positions = rng.integers(0, 2**31 - 2, count).tolist()
    probs = target.put(torch.full((count, vocab + 2), math.nan))[:, 1 : vocab + 1]
    got, status = draw_rows(target, rows, laws, seeds, positions, rng)
    again = draw_rows(target, rows, laws, seeds, positions, rng, probs=probs)
    assert again == (got, status)
    wide = rows.float().numpy()
    for i, law in enumerate(laws):
        found = probs[i].cpu().numpy()
        if law.temperature == 0 or got[i] < 0:
            assert np.isnan(found).all()
        else:  # what was drawn from, written out
            assert np.abs(found - probabilities(wide[i], law)).max() < 1e-5
            assert found[got[i]] > 0 and abs(found.sum(dtype=np.float64) - 1) < 1e-4
    want = [
        host_token(wide[i], law, seeds[i], positions[i] + 1)
        for i, law in enumerate(laws)
    ]  # fmt: skip
    assert got == want
    assert status == [NAN if token == -1 else 0 for token in want]


@pytest.mark.parametrize("vocab", [1, 5, 31, 33, 64, 255, 256, 257, 300, 1023, 1025])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@all_fast
def test_draws_are_the_hosts(target: Target, vocab: int, dtype: torch.dtype) -> None:
    check(target, vocab, dtype, 120 if vocab <= 300 else 60, 1)


@pytest.mark.parametrize(("vocab", "dtype"), [(4096, F32), (6144, BF16), (20_011, F16)])
@all_fast
def test_rows_in_pieces(target: Target, vocab: int, dtype: torch.dtype) -> None:
    """Rows that several blocks search, weigh and draw from together."""
    check(target, vocab, dtype, 16, 3)


@pytest.mark.parametrize("dtype", [F32, BF16])
@fast
def test_masses_are_the_hosts_at_every_exponent(target: Target, dtype: torch.dtype) -> None:
    """A draw at every 37th unit's share of rows whose weights fall from 1 to below the grid."""
    vocab, count = 4096, 64
    rng = np.random.default_rng(5)
    base = -np.linspace(0, 34, vocab).astype(np.float32)
    rows = torch.from_numpy(np.stack([rng.permutation(base) for _ in range(count)])).to(dtype)
    laws = [Law(float(t)) for t in np.geomspace(0.05, 40, count).astype(np.float32)]
    seeds, positions = list(range(count)), [7 * i for i in range(count)]
    got, _ = draw_rows(target, rows, laws, seeds, positions, rng)
    wide = rows.float().numpy()
    assert got == [
        host_token(wide[i], laws[i], seeds[i], positions[i] + 1) for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("vocab", "dtype"), [(7, F32), (300, BF16), (1024, F16), (5000, F32)])
@checked
def test_draws_under_the_checker(target: Target, vocab: int, dtype: torch.dtype) -> None:
    check(target, vocab, dtype, 12, 2)


@pytest.mark.parametrize("law", [law for law in LAWS if law.temperature > 1e-3], ids=str)
@fast
def test_cuts_beyond_the_list(target: Target, law: Law) -> None:
    """More tokens within reach of a cut than the list in shared memory holds (2048)."""
    rng = np.random.default_rng(LAWS.index(law))
    vocab = 9000
    rows = rng.normal(0, 1, (4, vocab)).astype(np.float32)
    rows[1] = np.round(rows[1])
    rows[2] = 0.25
    rows[3] *= 3
    laws = [law, Law(law.temperature, law.top_k and 3000, 0.6, law.min_p / 100)]
    for chosen in laws:
        seeds, positions = [5, 6, 7, 8], [1, 2, 3, 4]
        got, _ = draw_rows(target, torch.from_numpy(rows), [chosen] * 4, seeds, positions, rng)
        assert got == [host_token(rows[i], chosen, seeds[i], positions[i] + 1) for i in range(4)]


@checked
def test_a_cut_beyond_the_list_under_the_checker(target: Target) -> None:
    """Exactly top_k tokens are drawn from, of which no list holds all."""
    rng = np.random.default_rng(17)
    vocab, law = 9000, Law(1.0, top_k=3000)
    rows = rng.permutation(np.linspace(0, 1, vocab, dtype=np.float32))[None]
    probs = target.put(torch.full((1, vocab), math.nan))
    draw_rows(target, torch.from_numpy(rows), [law], [5], [1], rng, probs=probs)
    found = probs[0].cpu().numpy()
    assert np.abs(found - probabilities(rows[0], law)).max() < 1e-5
    assert np.count_nonzero(found) == law.top_k


def edge_rows(vocab: int) -> np.ndarray:
    """Rows whose likely tokens lie where groups of 8, chunks of 256 and pieces of 2,048 end."""
    edges = [0, 7, 8, 255, 256, 2047, 2048, vocab - 2, vocab - 1]
    flat, tied, falling = np.full((3, vocab), -4.0, np.float32)
    tied[edges] = 9.0
    falling[edges] = np.linspace(9, 7, len(edges))
    alone = np.full((len(edges), vocab), -np.inf, np.float32)
    alone[range(len(edges)), edges] = -3.0
    apart = flat.copy()
    apart[:8] = 2.0  # one group, no other token of the same bin
    nan, lost = falling.copy(), falling.copy()
    nan[vocab - 1] = math.nan
    lost[8:] = -np.inf
    return np.stack([flat, tied, falling, falling[::-1], apart, nan, lost, *alone])


CUT_LAWS = [Law(0.9, top_k=5), Law(1.0, top_p=0.7), Law(0.5, top_k=9, top_p=0.5), Law(1.0, top_k=1),
            Law(1.0, top_p=0.999, min_p=0.3), Law(1.0, top_k=4000)]  # fmt: skip


@pytest.mark.parametrize(("vocab", "dtype"), [(4096, F32), (4103, F32), (6149, BF16)])
@pytest.mark.parametrize("law", CUT_LAWS, ids=str)
@every_backend
def test_cuts_at_the_edges_of_what_a_block_reads(
    target: Target, law: Law, vocab: int, dtype: torch.dtype
) -> None:
    """Aligned rows and rows at odd addresses, pieces that are not full, ties across all edges."""
    rng = np.random.default_rng(vocab)
    rows = edge_rows(vocab)
    count = len(rows)
    seeds, positions = list(range(count)), [3 * i for i in range(count)]
    wide = torch.from_numpy(rows).to(dtype)
    for _ in range(2):
        got, _ = draw_rows(target, wide, [law] * count, seeds, positions, rng)
        held = wide.float().numpy()
        assert got == [host_token(held[i], law, seeds[i], positions[i] + 1) for i in range(count)]


@pytest.mark.parametrize("listed", [2047, 2048, 2049])
@every_backend
def test_a_list_that_is_just_full(target: Target, listed: int) -> None:
    """So many tokens in one bin: with one more than fit, none of them is listed."""
    rng = np.random.default_rng(listed)
    rows = np.full((3, 5000), -9.0, np.float32)
    for row in rows:
        row[rng.permutation(5000)[:listed]] = 1.0
    for law in (Law(1.0, top_k=2048), Law(1.0, top_p=0.9), Law(1.0, top_k=2049, top_p=0.99)):
        got, _ = draw_rows(target, torch.from_numpy(rows), [law] * 3, [1, 2, 3], [5, 6, 7], rng)
        assert got == [host_token(rows[i], law, i + 1, i + 6) for i in range(3)]


CROWD_LAWS = [Law(1.0, top_k=100), Law(1.0, top_p=0.4), Law(1.0, top_k=200, top_p=0.7),
              Law(1.0, top_k=100, min_p=0.9), Law(1.0, top_k=400, min_p=0.5)]  # fmt: skip


@pytest.mark.parametrize("crowd", [40, 255, 256, 257, 700])
@pytest.mark.parametrize("law", CROWD_LAWS, ids=str)
@fast
def test_a_cut_among_tokens_of_one_bin(target: Target, law: Law, crowd: int) -> None:
    """As many tokens as there are threads to look at them, or more: keys apart, in ties, alike."""
    rng = np.random.default_rng(crowd)
    vocab = 4000
    near = (1.0 + np.arange(crowd) * 2.0**-22).astype(np.float32)
    rows = np.full((3, vocab), -40.0, np.float32)
    for row, scores in zip(rows, [near, np.repeat(near, 3)[:crowd], near[:1]], strict=True):
        row[rng.permutation(vocab)[:crowd]] = rng.permutation(np.resize(scores, crowd))
    for first in (0, 40, 80):
        seeds, positions = [first, 1, 2], [first, 5, 9]
        got, _ = draw_rows(target, torch.from_numpy(rows), [law] * 3, seeds, positions, rng)
        assert got == [host_token(rows[i], law, seeds[i], positions[i] + 1) for i in range(3)]


BROAD_LAWS = [Law(1.0, top_k=50), Law(1.3, top_p=0.6), Law(2.0, top_p=0.9),
              Law(1.0, top_k=300, top_p=0.8), Law(1.0, top_k=60, min_p=0.1)]  # fmt: skip


@pytest.mark.parametrize("law", BROAD_LAWS, ids=str)
@fast
def test_cuts_of_rows_whose_lists_are_broad(target: Target, law: Law) -> None:
    """Hundreds of tokens with weight in tens of bins: whose sums carry, and cuts lie anywhere."""
    rng = np.random.default_rng(11)
    count = 48
    rows = rng.normal(0, 2, (count, 3000)).astype(np.float32)
    seeds, positions = list(range(count)), [7 * i for i in range(count)]
    got, _ = draw_rows(target, torch.from_numpy(rows), [law] * count, seeds, positions, rng)
    assert got == [host_token(rows[i], law, seeds[i], positions[i] + 1) for i in range(count)]


@fast
def test_cuts_of_more_groups_than_a_block_reads_at_once(target: Target) -> None:
    """Likely tokens at either end, and everywhere."""
    rng = np.random.default_rng(3)
    vocab = 8 * 16384 + 300
    rows = rng.normal(0, 1, (2, vocab)).astype(np.float32)
    rows[0, [0, 7, 8, vocab - 1]] = 9.0, 8.5, 8.75, 8.9
    rows[1, -400:] += 6.0
    for law in (Law(1.0, top_k=3), Law(0.3, top_p=0.5), Law(0.5, top_k=300, top_p=0.9)):
        got, _ = draw_rows(target, torch.from_numpy(rows), [law] * 2, [4, 5], [6, 7], rng)
        assert got == [host_token(rows[i], law, i + 4, i + 7) for i in range(2)]
    # Few in what a warp reads first, many in the rest: without the few the many reach top_p, too.
    rows = np.full((2, vocab), -50.0, np.float32)
    for row in rows:
        row[rng.choice(np.arange(4000, 16000), 60, replace=False)] = rng.uniform(1.0, 1.5, 60)
        row[rng.choice(np.arange(16384, 18432), 900, replace=False)] = rng.uniform(0.0, 1.4, 900)
    for seed in (1, 2, 3):
        law, seeds = Law(1.0, top_p=0.5), [seed, seed + 9]
        got, _ = draw_rows(target, torch.from_numpy(rows), [law] * 2, seeds, [6, 7], rng)
        assert got == [host_token(rows[i], law, seeds[i], i + 7) for i in range(2)]


@pytest.mark.parametrize("law", LAWS, ids=str)
@every_backend
def test_draws_equal_the_definition(target: Target, law: Law) -> None:
    """Against float64 by the book, through the operation itself."""
    rng = np.random.default_rng(LAWS.index(law))
    rows = np.concatenate([rng.normal(0, 3, (16, 90)), np.round(rng.normal(0, 2, (8, 90)))])
    rows = rows.astype(np.float32)
    count = len(rows)
    seeds, positions = list(range(count)), [100 + i for i in range(count)]
    got, _ = draw_rows(target, torch.from_numpy(rows), [law] * count, seeds, positions, rng)
    near = 0
    for row, seed, position, token in zip(rows, seeds, positions, got, strict=True):
        u = token_uniform(seed, position + 1)
        if token != draw(row, law, u):
            assert margin(row, law, u) < 1e-5
            near += 1
    assert near <= 1


@every_backend
def test_rows_of_requests(target: Target) -> None:
    """Requests of several rows, of none, and padding behind the last; the purpose is part of u."""
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 2, (9, 40)).astype(np.float32)
    laws = [Law(1.0), Law(0.5), GREEDY, Law(2.0, top_k=3)]
    firsts, owners = [0, 3, 3, 5, 7], [0, 0, 0, 2, 2, 3, 3]
    positions = [10, 11, 11, 5, 6, 2**31 - 2, 0, 1, 1]
    for purpose in ("token", "draft"):
        out = target.put(torch.full((9,), SENTINEL, dtype=torch.int32))
        ops.sample_rows(
            target.put(torch.from_numpy(rows)),
            target.put(int32(firsts)),
            target.put(int32(positions)),
            laws_on(target, laws, [1, 2, 3, 2**64 - 1]),
            out=out,
            purpose=purpose,
            backend=target.backend,
        )
        want = [
            host_token(rows[i], laws[b], [1, 2, 3, 2**64 - 1][b], positions[i] + 1, purpose)
            for i, b in enumerate(owners)
        ]
        assert out.tolist() == [*want, -1, -1]


@checked
def test_laws_that_are_none_are_flagged(target: Target) -> None:
    """What only a device can read is not believed; other requests are served."""
    bad = [
        Law(math.nan), Law(-1.0), Law(math.inf), Law(1.0, top_k=-1), Law(1.0, top_p=0.0),
        Law(1.0, top_p=1.5), Law(1.0, top_p=math.nan), Law(1.0, min_p=-0.1),
        Law(1.0, min_p=math.nan),
    ]  # fmt: skip
    rng = np.random.default_rng(4)
    rows = rng.normal(0, 2, (2 * len(bad), 50)).astype(np.float32)
    laws = [law for pair in zip(bad, [Law(1.0)] * len(bad), strict=True) for law in pair]
    seeds, positions = list(range(len(laws))), [7] * len(laws)
    got, status = draw_rows(target, torch.from_numpy(rows), laws, seeds, positions, rng)
    assert status == [BAD_LAW, 0] * len(bad)
    assert got[::2] == [-1] * len(bad)
    assert got[1::2] == [host_token(rows[i], Law(1.0), i, 8) for i in range(1, len(laws), 2)]


@checked
def test_requests_outside_of_the_rows_draw_nothing(target: Target) -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(0, 2, (4, 50)).astype(np.float32)
    for firsts in ([2, 1, 4], [-3, -1, 2], [0, 2**31 - 1, 5]):
        out = target.put(torch.full((4,), SENTINEL, dtype=torch.int32))
        ops.sample_rows(
            target.put(torch.from_numpy(rows)),
            target.put(int32(firsts)),
            target.put(int32([0] * 4)),
            laws_on(target, [Law(1.0)] * 2, [1, 2]),
            out=out,
            backend=target.backend,
        )
        assert all(-1 <= token < 50 for token in out.tolist())
