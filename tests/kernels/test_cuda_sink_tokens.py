"""Sink tokens in the accelerator's attention: the first positions, seen besides a window.

What no row of a request sees is NaN, and pages that lie wholly between have ids outside the pool:
whoever looks one up is flagged. Bits against plain decoding: the cases of test_cuda_exactness.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cuda_bounds import check
from cuda_calls import (
    BAD_PAGE,
    Target,
    attend,
    attend_with_status,
    checked,
    emulated_device,
    fast,
)
from cuda_instances import each_family, each_kernel, instance_problem, kernels
from kernel_calls import assert_same_bits, bits
from reference_attention import WILD_PAGE_ID, Problem, visible_slots


def without_pages_between(problem: Problem) -> tuple[Problem, int]:
    """The problem without the pages that no row sees, and how many those are."""
    page_size, table, left_out = problem.k_pages.shape[2], problem.page_table.clone(), 0
    for b, rows in enumerate(problem.rows):
        seen = {slot // page_size for row in range(rows) for slot in visible_slots(problem, b, row)}
        for page in range(-(-(problem.kv_len[b] + rows) // page_size)):
            if rows and page not in seen:
                table[b, page] = WILD_PAGE_ID
                left_out += 1
    return dataclasses.replace(problem, page_table=table), left_out


def check_both(target: Target, row: Any, problem: Problem, **options: Any) -> int:
    """Against float64, and the same bits without the pages between; returns how many those are."""
    check(target, problem, instance=row.name, **options)
    less, left_out = without_pages_between(problem)
    if left_out:
        options["instance"] = row.name
        assert_same_bits(attend(target, less, **options), attend(target, problem, **options))
    return left_out


@pytest.mark.parametrize("window", [1, 5, 17, 64, 100, 300])
@pytest.mark.parametrize("sinks", [1, 5, 19, 64, 150, 270])
@each_family
@fast
def test_values(target: Target, row: Any, sinks: int, window: int) -> None:
    """Texts shorter than the sink tokens, and longer; windows in the tree, in the sinks' tile,
    chunk and behind them."""
    left_out = 0
    for tree in (None, "deep"):
        for exact in (True, False):
            problem = instance_problem(
                row, sinks + window, kv_len=[690, 130, 3, 0], rows=[9, 33, 20, 11], tree=tree,
                max_depth=12, num_heads=2, num_kv_heads=1, sliding_window=window,
                sink_tokens=sinks,
            )  # fmt: skip
            left_out += check_both(target, row, problem, exact=exact, max_depth=12)
    assert left_out > 0


@each_kernel
@checked
def test_every_kind_of_kernel(target: Target, row: Any) -> None:
    """Pages of every size beside soft caps, logits of sinks and heads of one token in two tiles."""
    for page_size, window, sinks, tree in (
        (16, 70, 5, None), (64, 9, 67, "deep"), (128, 40, 3, "medusa"), (32, 260, 35, None),
    ):  # fmt: skip
        problem = instance_problem(
            row, page_size, kv_len=[197, 66, 0, 515], rows=[9, 30, 3, 2], tree=tree, max_depth=10,
            num_heads=6, num_kv_heads=2, page_size=page_size, sliding_window=window,
            sink_tokens=sinks, softcap=4.0 if tree else 0.0, sinks=page_size == 64,
        )  # fmt: skip
        for exact in (True, False):
            check_both(target, row, problem, exact=exact, max_depth=10)


@each_family
@fast
def test_around_every_edge(target: Target, row: Any) -> None:
    """Windows that begin at the sink tokens, in their tile, and at the ends of tiles and chunks."""
    for sinks, window in ((5, 50), (64, 30), (70, 200), (256, 20), (300, 100)):
        lows = {sinks + d for d in (-1, 0, 1, 2)}
        lows |= {e + d for e in (64, 128, 256, 320, 512, 576) for d in (-1, 0, 1) if e >= sinks}
        lengths = sorted(low + window - 1 for low in lows)
        problem = instance_problem(
            row, sinks, kv_len=lengths, rows=[1 + i % 2 for i in range(len(lengths))],
            max_depth=0, num_heads=1, num_kv_heads=1, page_size=32, sliding_window=window,
            sink_tokens=sinks,
        )  # fmt: skip
        check_both(target, row, problem, max_depth=0)


@each_family
@fast
def test_rows_of_one_tile_on_both_sides(target: Target, row: Any) -> None:
    """A prompt: of the rows in one tile some have everything and some a gap. How it is cut does
    not matter."""
    problem = instance_problem(
        row, 3, kv_len=[0], rows=[330], max_depth=4, num_heads=2, num_kv_heads=1,
        sliding_window=90, sink_tokens=70,
    )  # fmt: skip
    check(target, problem, instance=row.name, max_depth=4)
    whole = attend(target, problem, instance=row.name, max_depth=4)
    for size in (1, 37, 100):
        for begin in range(0, 330, 37 if size == 1 else size):
            end = min(330, begin + size)
            piece = dataclasses.replace(
                problem, q=problem.q[begin:end], kv_len=[begin], rows=[end - begin]
            )
            got = attend(target, piece, instance=row.name, max_depth=4)
            assert_same_bits(got, whole[begin:end])


@pytest.mark.parametrize(
    "row", [row for row in kernels() if row.family != "generic"], ids=lambda row: row.name
)
@checked
def test_the_number_of_blocks_does_not_matter(target: Target, row: Any) -> None:
    """Sums handed on from the sink tokens' unit to the window's, and states of each chunk of both;
    sink tokens of several chunks."""
    for sinks, window, kv_len in ((5, 700, [2600, 40, 1900]), (1000, 900, [2600])):
        problem = instance_problem(
            row, sinks, kv_len=kv_len, rows=[2, 3, 1][: len(kv_len)], max_depth=2, num_heads=2,
            num_kv_heads=1, page_size=64, sliding_window=window, sink_tokens=sinks,
        )  # fmt: skip
        outs = []
        for count in (1, 2, 3, 5, 64):
            major = 9 if row.family == "hopper" else 8
            with emulated_device(count, major=major):
                outs.append(attend(target, problem, instance=row.name, max_depth=2))
        check(target, problem, instance=row.name, max_depth=2)
        for out in outs[1:]:
            assert_same_bits(out, outs[0])


@each_family
@fast
def test_a_window_as_long_as_the_text_has_the_bits_of_none(target: Target, row: Any) -> None:
    problem = instance_problem(
        row, 1, kv_len=[170, 9], rows=[30, 30], tree="deep", max_depth=30, num_heads=2,
        num_kv_heads=1,
    )  # fmt: skip
    expected = attend(target, problem, instance=row.name, max_depth=30)
    for window, sinks in ((200, 4), (5000, 100), (100, 100), (60, 140)):
        limited = dataclasses.replace(problem, sliding_window=window, sink_tokens=sinks)
        assert_same_bits(attend(target, limited, instance=row.name, max_depth=30), expected)
    # Without a window they say nothing.
    alone = dataclasses.replace(problem, sink_tokens=7)
    assert_same_bits(attend(target, alone, instance=row.name, max_depth=30), expected)
    # With a shorter one they are seen.
    cut = dataclasses.replace(problem, sliding_window=20)
    with_sinks = dataclasses.replace(cut, sink_tokens=1)
    got = [attend(target, p, instance=row.name, max_depth=30) for p in (cut, with_sinks)]
    assert bool((bits(got[0]) != bits(got[1])).flatten(1).any(dim=1)[:30].all())


@each_family
@fast
def test_a_bad_page_of_a_sink_token_is_flagged(target: Target, row: Any) -> None:
    """In the tail's part of the sink tokens, too, which the finish kernel reads."""
    for max_depth in (2, 100):
        problem = instance_problem(
            row, 2, kv_len=[90, 90], rows=[2, 2], max_depth=max_depth, num_heads=2,
            num_kv_heads=1, sliding_window=9, sink_tokens=20,
        )  # fmt: skip
        good = attend(target, problem, instance=row.name, max_depth=max_depth)
        problem.page_table[0, 1] = problem.k_pages.shape[0]
        out, status = attend_with_status(target, problem, instance=row.name, max_depth=max_depth)
        assert status == [BAD_PAGE, 0]
        assert bool((out[:2] == 0).all())
        assert_same_bits(out[2:], good[2:])
        assert not torch.isnan(out).any()
