"""Speculative attention against float64, and its bits against themselves.

Every problem is hostile (reference_attention.py): NaN in all unused K/V and in the output before
the call, wild page ids, shuffled pages, strided rows. One element outside the bound, or NaN, fails.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from kernel_calls import assert_same_bits, attend, threads
from reference_attention import Problem, gather, random_problem, rounding_bound, visible_slots
from reference_attention import attend as reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = {BF16: 2.0**-8, F16: 2.0**-11}  # unit round-off
SMALLEST = {BF16: 0.0, F16: 2.0**-24}  # spacing of the subnormal numbers


def assert_close(problem: Problem) -> None:
    """Every element: at most twice torch's error in float32, plus rounding. On average: no more.

    The rival works in float32 on the stored values for 16-bit storage too (torch's own rounding of
    probabilities to 16 bits would make the bound weak); there the output's rounding is added.
    """
    got = attend(problem)
    exact = reference(problem)
    rival = (reference(problem, F32).double() - exact).abs()
    assert not got.isnan().any()
    error = (got.double() - exact).abs()
    bound = 2 * rival.max() + rounding_bound(problem)
    if got.dtype != F32:
        bound = bound + 1.01 * EPS[got.dtype] * exact.abs() + SMALLEST[got.dtype]
    assert bool((error <= bound).all()), f"worst excess {float((error - bound).max()):.3g}"
    if got.dtype == F32 and got.numel() >= 1000:
        mean, rival_mean = float(error.mean()), float(rival.mean())
        assert mean <= 1.5 * rival_mean + 2.0**-27, f"mean error {mean:.3g}, torch {rival_mean:.3g}"


def lengths(seed: int, count: int, top: int, rows_top: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    kv_len = [rng.choice([0, 1, rng.randint(0, top), top]) for _ in range(count)]
    rows = [rng.choice([1, rng.randint(1, rows_top), rows_top]) for _ in range(count)]
    return kv_len, rows


# -- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("tree", [None, "random"])
def test_page_sizes(page_size: int, tree: str | None) -> None:
    assert_close(
        random_problem(
            page_size, kv_len=[131, 0, 64], rows=[7, 33, 1], page_size=page_size, tree=tree
        )
    )


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 72, 80, 96, 128, 200, 248, 256])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    for tree in (None, "deep"):
        problem = random_problem(
            head_dim, kv_len=[37, 5], rows=[9, 21], head_dim=head_dim, dtype=dtype, tree=tree
        )
        assert_close(problem)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9])
def test_head_ratios(num_kv_heads: int, group: int) -> None:
    for rows in ([1], [5, 26]):
        problem = random_problem(
            group,
            kv_len=[50, 3][: len(rows)],
            rows=rows,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=32,
            tree="random",
        )
        assert_close(problem)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("kv_dtype", [F32, BF16, F16])
def test_storage_types_are_independent(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for tree in (None, "branches"):
        assert_close(
            random_problem(
                1, kv_len=[90, 4], rows=[12, 30], dtype=dtype, kv_dtype=kv_dtype, tree=tree
            )
        )


@pytest.mark.parametrize("tree", ["chain", "star", "branches", "deep", "random"])
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 63, 64, 65, 84, 127, 128])
def test_tree_shapes_and_mask_words(tree: str, size: int) -> None:
    assert_close(random_problem(size, kv_len=[45], rows=[size], tree=tree, head_dim=16))


@pytest.mark.parametrize("count", [1, 3, 16, 64])
@pytest.mark.parametrize("tree", [None, "random"])
def test_ragged_batches(count: int, tree: str | None) -> None:
    kv_len, rows = lengths(count, count, 97, 24)
    assert_close(
        random_problem(count, kv_len=kv_len, rows=rows, tree=tree, head_dim=16, page_size=8)
    )


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 63, 64, 65, 300])
@pytest.mark.parametrize("tree", [None, "deep", "chain", "star"])
def test_window_counts_positions(window: int, tree: str | None) -> None:
    problem = random_problem(
        window, kv_len=[130, 0, 20], rows=[40, 11, 1], tree=tree, head_dim=16, sliding_window=window
    )
    assert_close(problem)


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_softcap_and_sinks(softcap: float, spread: float) -> None:
    for sinks in (False, True):
        for window in (0, 9):
            problem = random_problem(
                3,
                kv_len=[75, 0],
                rows=[13, 40],
                tree="deep",
                softcap=softcap,
                spread=spread,
                sinks=sinks,
                sliding_window=window,
            )
            assert_close(problem)


def test_sinks_without_softcap_can_take_everything() -> None:
    problem = random_problem(5, kv_len=[30], rows=[4], sinks=True)
    assert problem.sinks is not None
    assert_close(problem)
    problem.sinks.fill_(200.0)  # above every score by far more than float32's range of exp
    assert bool((attend(problem) == 0).all())


def test_large_scores_do_not_overflow() -> None:
    problem = random_problem(6, kv_len=[300], rows=[9], tree="random", spread=1000.0)
    assert_close(problem)


def test_long_context_and_long_prefill() -> None:
    assert_close(random_problem(7, kv_len=[5000], rows=[2], head_dim=16, page_size=64))
    assert_close(
        random_problem(
            8, kv_len=[0], rows=[700], head_dim=8, num_heads=1, num_kv_heads=1, page_size=128
        )
    )


def test_pages_may_have_any_outer_strides() -> None:
    problem = random_problem(9, kv_len=[70, 3], rows=[9, 5], tree="random")
    expected = attend(problem)
    for order in [(0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)]:
        moved = []
        for pages in (problem.k_pages, problem.v_pages):
            copy = pages.permute(order).contiguous()
            moved.append(copy.permute([order.index(i) for i in range(4)]))
        other = dataclasses.replace(problem, k_pages=moved[0], v_pages=moved[1])
        assert not other.k_pages.is_contiguous()
        assert_same_bits(attend(other), expected)


def test_two_requests_may_share_pages() -> None:
    one = random_problem(10, kv_len=[64], rows=[1], page_size=16)
    pages = int(one.page_table[0, :5].max()) + 1
    assert pages <= one.k_pages.shape[0]
    table = one.page_table.repeat(2, 1)
    both = dataclasses.replace(
        one, q=one.q.repeat(2, 1, 1), page_table=table, kv_len=[64, 64], rows=[1, 1]
    )
    out = attend(both)
    assert_same_bits(out[0], out[1])
    assert_same_bits(out[:1], attend(one))


# -- Bits ----------------------------------------------------------------------------------------


def as_plain_decoding(problem: Problem, b: int, row: int, seed: int) -> Problem:
    """The row's path laid out as a committed prefix in other pages, and decoded with one row."""
    unbounded = dataclasses.replace(problem, sliding_window=0)
    slots = visible_slots(unbounded, b, row)
    tokens = problem.kv_len[b] + problem.rows[b]
    fresh = random_problem(
        seed,
        kv_len=[len(slots) - 1],
        rows=[1],
        num_heads=problem.q.shape[1],
        num_kv_heads=problem.k_pages.shape[1],
        head_dim=problem.q.shape[2],
        page_size=problem.k_pages.shape[2],
        dtype=problem.q.dtype,
        kv_dtype=problem.k_pages.dtype,
    )
    for from_pages, to_pages in (
        (problem.k_pages, fresh.k_pages),
        (problem.v_pages, fresh.v_pages),
    ):
        path = gather(from_pages, problem.page_table[b], tokens)[slots]
        page_size = to_pages.shape[2]
        for t, value in enumerate(path):
            to_pages[int(fresh.page_table[0, t // page_size]), :, t % page_size] = value
    return dataclasses.replace(
        fresh,
        q=problem.q[problem.cu_rows[b] + row][None],
        scale=problem.scale,
        softcap=problem.softcap,
        sliding_window=problem.sliding_window,
        sinks=problem.sinks,
    )


BIT_CASES = [
    dict(kv_len=[0], rows=[40], tree="random"),
    dict(kv_len=[50], rows=[84], tree="branches"),
    dict(kv_len=[63, 64, 65], rows=[20, 33, 12], tree="deep", page_size=1),
    dict(kv_len=[127], rows=[128], tree="random", num_heads=9, num_kv_heads=3, page_size=64),
    dict(kv_len=[33], rows=[30], tree="star", dtype=BF16, head_dim=40),
    dict(kv_len=[33, 200], rows=[30, 5], tree="deep", dtype=F16, kv_dtype=BF16, page_size=2),
    dict(kv_len=[70], rows=[50], tree="deep", sliding_window=21, softcap=5.0, sinks=True),
    dict(kv_len=[70], rows=[50], tree="chain", sliding_window=7),
    dict(kv_len=[90, 3], rows=[60, 70], softcap=2.0),
    dict(kv_len=[150], rows=[90], sliding_window=40, num_heads=3, num_kv_heads=1),
    dict(kv_len=[17], rows=[19], tree="random", head_dim=256, num_heads=4, num_kv_heads=1),
    dict(kv_len=[17], rows=[19], tree="random", head_dim=8, num_heads=2, num_kv_heads=2),
]


@pytest.mark.parametrize("case", range(len(BIT_CASES)))
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_row_has_the_bits_of_plain_decoding(case: int, num_threads: int) -> None:
    problem = random_problem(case, **BIT_CASES[case])
    with threads(num_threads):
        out = attend(problem)
    for b, count in enumerate(problem.rows):
        for row in range(count):
            with threads(1):
                alone = attend(as_plain_decoding(problem, b, row, seed=1000 + row))
            assert_same_bits(out[problem.cu_rows[b] + row][None], alone)


def test_threads_and_repetition_do_not_change_bits() -> None:
    for case, settings in enumerate(BIT_CASES):
        problem = random_problem(100 + case, **settings)
        with threads(1):
            expected = attend(problem)
            assert_same_bits(attend(problem), expected)
        for count in (2, 3, 5):
            with threads(count):
                assert_same_bits(attend(problem), expected)
                assert_same_bits(attend(problem), expected)


def split_rows(problem: Problem, b: int, begin: int, end: int) -> Problem:
    """Rows [begin, end) of a causal request alone, the rows before them counted as prefix."""
    first = problem.cu_rows[b]
    return dataclasses.replace(
        problem,
        q=problem.q[first + begin : first + end],
        page_table=problem.page_table[b : b + 1].contiguous(),
        kv_len=[problem.kv_len[b] + begin],
        rows=[end - begin],
        parents=[problem.parents[b]] if problem.parents else None,
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [0, 50])
def test_prefill_chunks_do_not_change_bits(dtype: torch.dtype, window: int) -> None:
    problem = random_problem(
        11, kv_len=[5], rows=[333], head_dim=32, dtype=dtype, sliding_window=window
    )
    whole = attend(problem)
    rng = random.Random(0)
    for sizes in ([1] * 333, [32] * 10 + [13], [300, 33], [rng.randint(1, 90) for _ in range(30)]):
        begin = 0
        for size in sizes:
            end = min(333, begin + size)
            if begin < end:
                part = attend(split_rows(problem, 0, begin, end))
                assert_same_bits(part, whole[begin:end])
            begin = end


@pytest.mark.parametrize("tree", [None, "random"])
def test_alone_equals_in_a_batch(tree: str | None) -> None:
    kv_len, rows = lengths(12, 24, 150, 30)
    problem = random_problem(12, kv_len=kv_len, rows=rows, tree=tree, num_heads=9, num_kv_heads=3)
    out = attend(problem)
    for b in range(len(rows)):
        alone = attend(split_rows(problem, b, 0, rows[b]))
        assert_same_bits(alone, out[problem.cu_rows[b] : problem.cu_rows[b + 1]])


def test_a_causal_chain_equals_the_same_chain_given_as_a_tree() -> None:
    problem = random_problem(13, kv_len=[77], rows=[100], tree="chain")
    causal = dataclasses.replace(problem, parents=None)
    assert_same_bits(attend(problem), attend(causal))


def test_a_nan_reaches_only_the_rows_that_see_it() -> None:
    problem = random_problem(14, kv_len=[40], rows=[30], tree="branches", page_size=16)
    clean = attend(problem)
    poisoned_row = 5  # the root of the second branch: rows 5..8 descend from it
    token = 40 + poisoned_row
    page = int(problem.page_table[0, token // 16])
    problem.v_pages[page, :, token % 16] = torch.nan
    out = attend(problem)
    for row in range(30):
        sees = token in visible_slots(problem, 0, row)
        assert bool(out[row].isnan().all()) == sees
        if not sees:
            assert_same_bits(out[row], clean[row])


@pytest.mark.parametrize(("first_key", "window"), [(1, 0), (17, 0), (20, 9), (5, 40)])
@pytest.mark.parametrize("tree", [None, "deep"])
def test_nothing_in_front_of_the_first_key_is_seen(
    first_key: int, window: int, tree: str | None
) -> None:
    problem = random_problem(
        first_key, kv_len=[60, first_key], rows=[9, 12], head_dim=16, tree=tree,
        sliding_window=window,
    )  # fmt: skip
    problem = dataclasses.replace(problem, first_key=first_key)
    size = problem.k_pages.shape[2]
    for table in problem.page_table:
        for position in range(first_key):
            for pages in (problem.k_pages, problem.v_pages):
                pages[int(table[position // size]), :, position % size] = torch.nan
    assert_close(problem)
    early = dataclasses.replace(problem, first_key=first_key + 1)
    with pytest.raises(ValueError, match=rf"kv_len\[1\] = {first_key}: rows lie at first_key = "):
        attend(early)
    both = dataclasses.replace(problem, sink_tokens=2)
    with pytest.raises(ValueError, match=rf"first_key = {first_key}, sink_tokens = 2: give 0 for"):
        attend(both)
