"""Attention windows with sink tokens: against float64, and their bits against themselves.

Every problem is hostile (reference_attention.py), and what no row of a request sees is NaN: pages
behind the windows belong to somebody else by then.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kernel_calls import assert_same_bits, attend, threads
from narrow_kv import narrow
from reference_attention import Problem, gather, random_problem, rounding_bound, visible_slots
from reference_attention import attend as reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
EPS = {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}


def problem_of(seed: int, **settings: Any) -> Problem:
    """A random problem whose K/V is NaN wherever no row sees it."""
    problem = random_problem(seed, **settings)
    page_size = problem.k_pages.shape[2]
    for b, rows in enumerate(problem.rows):
        seen = {slot for row in range(rows) for slot in visible_slots(problem, b, row)}
        for slot in set(range(problem.kv_len[b] + rows)) - seen:
            page = int(problem.page_table[b, slot // page_size])
            problem.k_pages[page, :, slot % page_size] = torch.nan
            problem.v_pages[page, :, slot % page_size] = torch.nan
    return problem


def assert_close(problem: Problem, values: Problem | None = None) -> None:
    """values  the same problem in wider pages, where those of `problem` have 8 bits"""
    values = values or problem
    got = attend(problem)
    exact = reference(values)
    rival = (reference(values, F32).double() - exact).abs()
    bound = 2 * rival.max() + rounding_bound(values)
    bound = bound + 1.01 * EPS[got.dtype] * exact.abs() + 2.0**-24 * (got.dtype == F16)
    assert not got.isnan().any()
    error = (got.double() - exact).abs()
    assert bool((error <= bound).all()), f"worst excess {float((error - bound).max()):.3g}"


WINDOWS = [1, 2, 7, 16, 37, 64, 65, 200]
SINKS = [0, 1, 4, 17, 64, 65, 150]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tree", [None, "deep", "chain", "star"])
def test_values(window: int, tree: str | None) -> None:
    """Windows smaller than the draft tree and larger than the text; sinks in the text and the tree,
    before, across and behind the window."""
    for sinks in SINKS:
        problem = problem_of(
            window + sinks, kv_len=[260, 0, 3, 90], rows=[40, 11, 21, 1], tree=tree, head_dim=16,
            sliding_window=window, sink_tokens=sinks,
        )  # fmt: skip
        assert_close(problem)


@pytest.mark.parametrize("page_size", [1, 8, 128])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("kv_dtype", [F32, BF16, F16])
def test_storage_types(page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for tree, softcap, sinks in ((None, 0.0, False), ("deep", 3.0, True)):
        assert_close(
            problem_of(
                page_size, kv_len=[310, 30], rows=[12, 30], page_size=page_size, dtype=dtype,
                kv_dtype=kv_dtype, tree=tree, sliding_window=19, sink_tokens=5, softcap=softcap,
                sinks=sinks, num_heads=6, head_dim=40,
            )
        )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [E4M3, INT8])
@pytest.mark.parametrize("tree", [None, "random"])
def test_eight_bits(kv_dtype: torch.dtype, tree: str | None) -> None:
    for window, sinks in ((1, 1), (37, 4), (90, 70)):
        wide = problem_of(
            window, kv_len=[300, 9], rows=[50, 7], tree=tree, sliding_window=window,
            sink_tokens=sinks,
        )  # fmt: skip
        scales = [torch.tensor([0.7]), torch.tensor([1.3])] if kv_dtype == E4M3 else []
        stored, values = narrow(wide, kv_dtype, *scales)
        assert_close(stored, values)
        assert_same_bits(attend(stored), attend(values))


def plain(problem: Problem, b: int, row: int) -> Problem:
    """The row's path as a committed text in pages of its own, and decoded with one row."""
    everything = dataclasses.replace(problem, sliding_window=0)
    path = visible_slots(everything, b, row)
    seen = set(visible_slots(problem, b, row))
    tokens = problem.kv_len[b] + problem.rows[b]
    fresh = random_problem(
        row, kv_len=[len(path) - 1], rows=[1], num_heads=problem.q.shape[1],
        num_kv_heads=problem.k_pages.shape[1], head_dim=problem.q.shape[2], page_size=4,
    )  # fmt: skip
    for source, pages in ((problem.k_pages, fresh.k_pages), (problem.v_pages, fresh.v_pages)):
        numbers = gather(source, problem.page_table[b], tokens)
        for position, slot in enumerate(path):
            value = numbers[slot] if slot in seen else torch.full_like(numbers[slot], torch.nan)
            pages[int(fresh.page_table[0, position // 4]), :, position % 4] = value
    same = {
        name: getattr(problem, name)
        for name in ("scale", "softcap", "sliding_window", "sink_tokens", "sinks")
    }
    return dataclasses.replace(fresh, q=problem.q[problem.cu_rows[b] + row][None], **same)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("window", "sinks"), [(1, 3), (5, 4), (21, 2), (40, 66), (130, 70)])
def test_a_drafted_row_has_the_bits_of_plain_decoding(
    num_threads: int, window: int, sinks: int
) -> None:
    for tree in (None, "deep", "random"):
        problem = problem_of(
            window, kv_len=[2, 230], rows=[45, 33], tree=tree, sliding_window=window,
            sink_tokens=sinks, softcap=4.0, sinks=True,
        )  # fmt: skip
        with threads(num_threads):
            out = attend(problem)
        for b, rows in enumerate(problem.rows):
            for row in range(0, rows, 3):
                with threads(1):
                    alone = attend(plain(problem, b, row))
                assert_same_bits(out[problem.cu_rows[b] + row][None], alone)


@pytest.mark.parametrize("tree", [None, "deep"])
@pytest.mark.parametrize("sinks", [0, 4, 100])
def test_a_window_as_long_as_the_text_has_the_bits_of_none(tree: str | None, sinks: int) -> None:
    problem = random_problem(1, kv_len=[170, 9], rows=[30, 30], tree=tree)
    expected = attend(problem)
    for window in (200, 201, 5000):
        limited = dataclasses.replace(problem, sliding_window=window, sink_tokens=sinks)
        assert_same_bits(attend(limited), expected)
    # Sink tokens and a window that touch leave nothing out.
    if sinks == 100:
        touching = dataclasses.replace(problem, sliding_window=100, sink_tokens=sinks)
        assert_same_bits(attend(touching), expected)


def test_chunks_of_a_prompt_do_not_change_bits() -> None:
    problem = problem_of(2, kv_len=[0], rows=[400], head_dim=16, sliding_window=30, sink_tokens=6)
    whole = attend(problem)
    for size in (1, 7, 64, 150):
        for begin in range(0, 400, size):
            end = min(400, begin + size)
            part = dataclasses.replace(
                problem, q=problem.q[begin:end], kv_len=[begin], rows=[end - begin]
            )
            assert_same_bits(attend(part), whole[begin:end])


def test_refusals() -> None:
    problem = random_problem(3, kv_len=[3], rows=[2])
    with pytest.raises(ValueError, match=r"sink_tokens = -1: give 0 \(none\)"):
        attend(dataclasses.replace(problem, sink_tokens=-1))
    # Without a window they say nothing.
    assert_same_bits(attend(dataclasses.replace(problem, sink_tokens=2)), attend(problem))
