"""Attention with e4m3 matrix operands (instance="fp8"): its own numerics, its own bound.

Queries and weights of the main part are rounded to e4m3. The bound is twice the error of a float32
emulation that rounds both alike, against float64 on the pages as they are; everything else that
holds for the other kernels holds here, node == path among it, within these numerics.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from cuda_bounds import BF16, EPS, F16
from cuda_calls import (
    BAD_PAGE,
    NAN,
    Target,
    attend,
    attend_with_status,
    checked,
    differing,
    emulated_device,
    fast,
)
from cuda_instances import Row
from cuda_problems import F8, TREES, hostile_problem, part, places, put, replay
from kernel_calls import assert_same_bits, bits
from reference_attention import Problem, dense_attend, dense_scores

from specdec_ext import ops


def kernels() -> list[Row]:
    return [
        Row(r["name"], "hopper", getattr(torch, r["dtype"]), F8, r["head_dim"], r["row_tile"])
        for r in ops.supported_attention()
        if r["math_dtype"] == "float8_e4m3fn"
    ]


KERNELS = kernels()
each_fp8 = pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
one_fp8 = pytest.mark.parametrize(
    "row", [row for row in KERNELS if row.dtype == F16][-1:], ids=lambda row: row.name
)


def problem_for(row: Row, seed: int, **options: Any) -> Problem:
    settings = {"num_heads": 3, "num_kv_heads": 1, "scales": 2 - seed % 2, **options}
    return hostile_problem(seed, head_dim=row.head_dim, dtype=row.dtype, kv_dtype=F8, **settings)


def rounded_queries(q: torch.Tensor) -> torch.Tensor:
    """float32: each row in e4m3 after the power of two that brings its largest to [128, 256)."""
    values = q.float()
    exponent = torch.frexp(values.abs().amax(dim=2, keepdim=True)).exponent
    factor = torch.exp2((8 - exponent).float())
    return (values * factor).to(F8).float() / factor


def emulation(problem: Problem) -> torch.Tensor:
    """[R, H, K] float32: queries and weights (of 256 at most) rounded to e4m3, nothing else."""
    out = torch.zeros(problem.q.shape)
    rounded = dataclasses.replace(problem, q=rounded_queries(problem.q))
    for rows, heads, scores, v, _ in dense_scores(rounded, torch.float32):
        top = scores.amax(dim=2, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=2, keepdim=True)
        if problem.sinks is not None:
            total = total + torch.exp(problem.sinks[heads][:, None] - top)
        out[rows, heads] = ((256 * weights).to(F8).float() / 256 @ v) / total
    return out


def assert_as_good_as_the_emulation(problem: Problem, got: torch.Tensor) -> None:
    """The largest error: at most twice the emulation's. In the mean of all squares: no more than
    the emulation's, and a tenth.

    Every element: at most twice the emulation's largest of the row and head, the rounding of the
    result, and twice one round-off (2^-4) of every weight, added as independent errors: weights
    round otherwise when the row's maximum was not seen yet, and a row of one or two great weights
    may by luck lose nothing in the emulation.
    """
    exact, spread, score = dense_attend(problem)
    assert not bool(got.isnan().any()), "NaN in the result"
    error = (got.double() - exact).abs()
    rival = (emulation(problem).double() - exact).abs()
    rounding = EPS[problem.q.dtype] * exact.abs() + 2.0**-20 * score
    assert float((error - rounding).max()) <= 2 * float(rival.max())
    mean = float(error.square().mean().sqrt() / rival.square().mean().sqrt())
    assert mean <= 1.1, f"{mean:.3f} times the emulation's error"
    excess = error - 2 * rival.amax(dim=2, keepdim=True) - rounding - 2.0**-3 * spread
    worst = int(excess.flatten().argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape)]
    assert bool((excess <= 0).all()), (
        f"{int((excess > 0).sum())} elements outside; worst at {where}: "
        f"{float(error[tuple(where)]):.3g}, too much by {float(excess[tuple(where)]):.3g}"
    )


def check(target: Target, row: Row, problem: Problem, **options: Any) -> None:
    out = attend(target, problem, instance=row.name, **options)
    assert_as_good_as_the_emulation(problem, out)


# -- The emulation itself --------------------------------------------------------------------------


def test_the_emulation_rounds_what_it_should() -> None:
    q = torch.tensor([[[1.0, 1.0625, 0.001, -3.3], [0.0, 0.0, 0.0, 0.0]]])
    #  1.0625 lies half way between 1 and 1.125; 0.001 * 64 = 0.064 has 3 bits of 2^-4; -3.3 too.
    expected = torch.tensor([[[1.0, 1.0, 0.0625 / 64 * 1.0, -3.25], [0.0] * 4]])
    assert torch.equal(rounded_queries(q), expected)


# -- Values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
@each_fp8
@checked
def test_every_kernel(target: Target, row: Row, exact: bool) -> None:
    problem = problem_for(
        row, 1 + exact, kv_len=[33, 0, 397], rows=[17, 3, 6], tree="random", max_depth=24
    )
    check(target, row, problem, exact=exact, max_depth=24)


EDGES = sorted({0, 1} | {edge + d for edge in (32, 64, 128, 256, 320) for d in (-1, 0, 1)})


@pytest.mark.parametrize("exact", [True, False])
@one_fp8
@checked
def test_lengths_around_every_edge(target: Target, row: Row, exact: bool) -> None:
    for tree, rows in (
        (None, [1] * len(EDGES)),
        ("random", [2 + i % 3 for i in range(len(EDGES))]),
    ):
        problem = problem_for(
            row, 3, kv_len=EDGES, rows=rows, tree=tree, max_depth=5, num_heads=1, page_size=32
        )
        check(target, row, problem, exact=exact, max_depth=5)


@one_fp8
@checked
def test_hard_cases(target: Target, row: Row) -> None:
    for seed, options in enumerate(
        (
            {"tree": ["random", "medusa", "chain", "star"]},
            {"tree": None, "sliding_window": 70, "softcap": 4.0, "sinks": True},
            {"tree": "deep", "sliding_window": 90, "sinks": True, "spread": 4.0},
        )
    ):
        problem = problem_for(
            row,
            seed,
            kv_len=[197, 66, 0, 515],
            rows=[9, 30, 3, 2],
            max_depth=10,
            num_heads=6,
            num_kv_heads=2,
            shared_pages=4,
            **options,
        )
        for exact in (True, False):
            check(target, row, problem, exact=exact, max_depth=10)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@one_fp8
@fast
def test_past_every_window(target: Target, row: Row, page_size: int) -> None:
    """Longer than what is looked up at a time, and than the chunks of 256 keys."""
    problem = problem_for(
        row, 4, kv_len=[2700, 2040], rows=[2, 9], tree="random", max_depth=4, page_size=page_size
    )
    for exact in (True, False):
        check(target, row, problem, exact=exact, max_depth=4)


@pytest.mark.parametrize("power", [-24, -6, 9, 60])
@fast
def test_queries_of_every_size(target: Target, power: int) -> None:
    """A power of two in q and its inverse in the scale change nothing, bit by bit."""
    row = next(row for row in KERNELS if row.dtype == BF16)
    problem = problem_for(row, 5, kv_len=[150], rows=[12], tree="binary")
    problem.q[0] = 0
    expected = attend(target, problem, instance=row.name, max_depth=4, exact=False)
    moved = dataclasses.replace(problem, scale=problem.scale * 2.0**-power)
    moved.q.copy_(problem.q.float() * 2.0**power)
    got = attend(target, moved, instance=row.name, max_depth=4, exact=False)
    assert_same_bits(got, expected)


@one_fp8
@checked
def test_queries_that_e4m3_holds_lose_nothing(target: Target, row: Row) -> None:
    """Their largest number is close below a power of two: one that is scaled too far saturates."""
    problem = problem_for(row, 15, kv_len=[200], rows=[6])
    gen = torch.Generator().manual_seed(15)
    power = torch.randint(-1, 1, problem.q.shape, generator=gen)
    problem.q.copy_(1.875 * torch.exp2(power.float()) * problem.q.sign())
    assert torch.equal(rounded_queries(problem.q), problem.q.float())
    check(target, row, problem, exact=False)


@one_fp8
@checked
def test_many_small_weights_count(target: Target, row: Row) -> None:
    """One key weighs 2^9.7 times as much as each of the others, which together outweigh a half."""
    problem = problem_for(row, 16, kv_len=[600], rows=[1], num_heads=1, scales=0)
    query = problem.q[0, 0].float()
    where = places(problem.page_table[0], range(601), 16)
    large = 9.7 * torch.log(torch.tensor(2.0)) / problem.scale / query.square().sum() * query
    keys = torch.zeros(601, 1, query.numel())
    keys[7] = large
    gen = torch.Generator().manual_seed(16)
    values = 1 + 0.1 * torch.randn(601, 1, query.numel(), generator=gen)
    values[7] = 0
    put(problem.k_pages, *where, keys)
    put(problem.v_pages, *where, values)
    check(target, row, problem, exact=False)


# -- Bits ------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    dict(kv_len=[150], rows=[84], tree="medusa", max_depth=12),
    dict(kv_len=[63, 64, 65], rows=[20, 33, 12], tree="deep", max_depth=16),
    dict(kv_len=[31, 262], rows=[30, 5], tree="star", max_depth=1, page_size=64),
    dict(kv_len=[190], rows=[50], tree="deep", max_depth=50, sliding_window=71, softcap=5.0,
         sinks=True),
    dict(kv_len=[320], rows=[90], sliding_window=140, max_depth=5),
    dict(kv_len=[600, 3], rows=[40, 30], tree="deep", max_depth=30, sliding_window=71,
         sink_tokens=21),
    dict(kv_len=[517, 0], rows=[27, 1], tree="binary", max_depth=8, num_heads=5),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
@one_fp8
@fast
def test_every_row_has_the_bits_of_plain_decoding(target: Target, row: Row, case: int) -> None:
    problem = problem_for(row, case, **CASES[case])
    depth = CASES[case]["max_depth"]
    out = attend(target, problem, instance=row.name, max_depth=depth)
    nodes = [(b, i) for b, n in enumerate(problem.rows) for i in range(n)]
    chosen = sorted(random.Random(case).sample(range(len(nodes)), min(24, len(nodes))))
    alone = attend(
        target, replay(problem, [nodes[i] for i in chosen]), instance=row.name, max_depth=depth
    )
    wrong = [
        nodes[i] for i, got in zip(chosen, alone, strict=True) if (bits(got) != bits(out[i])).any()
    ]
    assert not wrong, f"{len(wrong)} of {len(chosen)} rows differ from plain decoding: {wrong[:8]}"


@one_fp8
@checked
def test_the_number_of_sms_does_not_matter(target: Target, row: Row) -> None:
    if target.device != "cpu":
        pytest.skip("a GPU has the multiprocessors it has")
    problem = problem_for(row, 7, kv_len=[1500, 20, 300], rows=[3, 9, 1], tree="random")
    for exact in (True, False):
        results = []
        for count in (1, 3, 132):
            with emulated_device(count):
                results.append(attend(target, problem, instance=row.name, exact=exact, max_depth=8))
        for result in results[1:]:
            assert_same_bits(result, results[0])


@fast
def test_the_row_tile_does_not_matter(target: Target) -> None:
    rows = [row for row in KERNELS if row.dtype == BF16]
    assert len({row.row_tile for row in rows}) > 1
    problem = problem_for(rows[0], 8, kv_len=[290, 70], rows=[70, 33], tree="random")
    for exact in (True, False):
        results = [
            attend(target, problem, instance=row.name, exact=exact, max_depth=30) for row in rows
        ]
        for result in results[1:]:
            assert_same_bits(result, results[0])


@one_fp8
@fast
def test_a_request_alone_equals_it_in_a_batch(target: Target, row: Row) -> None:
    problem = problem_for(row, 9, kv_len=[190, 64, 7], rows=[9, 40, 3], tree=TREES[4])
    out = attend(target, problem, instance=row.name, max_depth=40)
    for b in range(3):
        first, last = problem.cu_rows[b : b + 2]
        alone = attend(target, part(problem, b, 0, last - first), instance=row.name, max_depth=40)
        assert_same_bits(alone, out[first:last])


@one_fp8
@fast
def test_it_is_not_the_arithmetic_of_16_bits(target: Target, row: Row) -> None:
    """So no caller gets it unasked, and its name does ask for it."""
    problem = problem_for(row, 10, kv_len=[300], rows=[4])
    default = attend(target, problem)
    assert differing(attend(target, problem, instance=row.name), default) > 100
    chosen = attend(target, problem, instance="fp8")
    assert_same_bits(chosen, attend(target, problem, instance=row.name))


# -- Bad data --------------------------------------------------------------------------------------


@one_fp8
@checked
def test_bad_data_flags_its_request_and_no_other(target: Target, row: Row) -> None:
    def problem() -> Problem:
        return problem_for(
            row, 12, kv_len=[100, 170, 20], rows=[3, 4, 2], tree="star", max_depth=4, page_size=16
        )

    clean = attend(target, problem(), instance=row.name, max_depth=4)

    def broken(bad: Problem, request: int, flag: int) -> torch.Tensor:
        out, status = attend_with_status(target, bad, instance=row.name, max_depth=4)
        assert status[request] & flag, status
        status[request] = 0
        assert not any(status), status
        mine = range(bad.cu_rows[request], bad.cu_rows[request + 1])
        others = [i for i in range(clean.shape[0]) if i not in mine]
        assert_same_bits(out[others], clean[others])
        return out[list(mine)]

    for index in (0, 7, 10):
        bad = problem()
        bad.page_table[1, index] = 2**31 - 1
        assert bool((broken(bad, 1, BAD_PAGE) == 0).all())
    for pages in ("k_pages", "v_pages"):
        for slot in (3, 65, 150):
            bad = problem()
            where = int(bad.page_table[1, slot // 16]), slice(None), slot % 16
            getattr(bad, pages).view(torch.uint8)[where] = 0x7F
            broken(bad, 1, NAN)
    for value in (torch.nan, torch.inf, -torch.inf):
        bad = problem()
        bad.q[bad.cu_rows[1] + 1, 0, 5] = value
        broken(bad, 1, NAN)


@one_fp8
@checked
def test_an_infinite_query_is_flagged_without_a_tail(target: Target, row: Row) -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        bad = problem_for(row, 13, kv_len=[70, 64], rows=[2, 1])
        bad.q[1, 2, 9] = value
        _, status = attend_with_status(target, bad, instance=row.name, exact=False)
        assert status == [NAN, 0]
