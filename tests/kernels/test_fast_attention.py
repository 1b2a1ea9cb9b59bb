"""Attention that need not be exact: q and the probabilities are rounded to bfloat16 where a
processor multiplies that.

It is held against float64 with just these roundings, and against float64 without any. Other calls,
and all calls on other processors, have the bits of exact attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kernel_calls import assert_same_bits, attend, threads
from reference_attention import Problem, gather, random_problem, rounding_bound, visible_slots
from reference_attention import attend as reference

from specdec_ext import _core

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
needs_products = pytest.mark.skipif(
    _core.cpu_isa() not in ("amx", "avx512_bf16"), reason="a processor without products in bf16"
)


def narrow_reference(problem: Problem) -> torch.Tensor:
    """[R, H, K] float64: q * scale and the weights of keys in common slots are bfloat16 numbers."""
    num_heads = problem.q.shape[1]
    group = num_heads // problem.k_pages.shape[1]
    out = torch.empty(problem.q.shape, dtype=torch.float64)
    for b, first in enumerate(problem.cu_rows[:-1]):
        tokens = problem.kv_len[b] + problem.rows[b]
        keys, values = (
            gather(pages, problem.page_table[b], tokens).double()
            for pages in (problem.k_pages, problem.v_pages)
        )
        for row in range(problem.rows[b]):
            slots = torch.tensor(visible_slots(problem, b, row))
            k = keys[slots].repeat_interleave(group, dim=1)
            v = values[slots].repeat_interleave(group, dim=1)
            q = (problem.q[first + row].float() * problem.scale).to(BF16).double()
            scores = torch.einsum("hk,nhk->hn", q, k)
            if problem.softcap:
                scores = problem.softcap * torch.tanh(scores / problem.softcap)
            top, total = scores.amax(dim=1, keepdim=True), torch.zeros(num_heads, 1).double()
            if problem.sinks is not None:
                sink = problem.sinks.double()[:, None]
                top = torch.maximum(top, sink)
                total += (sink - top).exp()
            weights = (scores - top).exp()
            total += weights.sum(dim=1, keepdim=True)
            narrow = weights.to(BF16).double()
            if problem.parents is not None:  # of a tree's own rows they stay
                narrow = torch.where(slots < problem.kv_len[b], narrow, weights)
            out[first + row] = torch.einsum("hn,nhk->hk", narrow / total, v)
    return out


def assert_close(problem: Problem, *, differs: bool = True) -> None:
    """differs: from exact attention."""
    got, expected = attend(problem, exact=False).double(), narrow_reference(problem)
    assert not got.isnan().any()
    exact, unit = reference(problem), rounding_bound(problem)
    # A score that is off by a unit of float32 may round its weight to the other neighbour.
    off = (got - expected).abs()
    output = 2.0**-8 * exact.abs() if problem.q.dtype == BF16 else 0.0
    assert bool((off <= 2.0**13 * unit + output).all()), "not these roundings"
    assert off.mean() <= 0.02 * unit.mean() * 2**15 + 2.0**-9 * (problem.q.dtype == BF16)
    # 2^-9 of each product of q, in numerator and denominator of a weight, and of the weight.
    assert bool(((got - exact).abs() <= 2.2 * 2**15 * unit + output).all())
    assert torch.equal(got, attend(problem).double()) != differs


def problem_of(seed: int, **options: Any) -> Problem:
    how: dict[str, Any] = {"kv_len": [131, 0, 64], "rows": [17, 33, 9], "kv_dtype": BF16}
    return random_problem(seed, **{**how, **options})


@needs_products
@pytest.mark.parametrize("tree", [None, "chain", "star", "branches", "random"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_trees_and_chains(tree: str | None, num_threads: int) -> None:
    with threads(num_threads):
        assert_close(problem_of(1, tree=tree))


@needs_products
@pytest.mark.parametrize("page_size", [1, 4, 16, 128])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
def test_pages_and_head_dims(page_size: int, head_dim: int) -> None:
    assert_close(problem_of(2, page_size=page_size, head_dim=head_dim, tree="random"))
    assert_close(problem_of(3, page_size=page_size, head_dim=head_dim))


@needs_products
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (9, 3), (8, 1), (14, 2)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_heads(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Whole tiles of row-heads, parts of one, several blocks of 64."""
    for rows in ([8, 16], [17, 84], [33, 48]):
        assert_close(
            problem_of(4, num_heads=heads, num_kv_heads=kv_heads, dtype=dtype, rows=rows,
                       kv_len=[40, 300])
        )  # fmt: skip


@needs_products
@pytest.mark.parametrize("window", [1, 5, 16, 64, 65, 300])
@pytest.mark.parametrize("sinks", [0, 3, 70])
@pytest.mark.parametrize("tree", [None, "deep"])
def test_windows(window: int, sinks: int, tree: str | None) -> None:
    """Slots between the sinks and the window hold NaN."""
    problem = problem_of(5, kv_len=[400, 90], rows=[24, 30], sliding_window=window, tree=tree)
    problem = dataclasses.replace(problem, sink_tokens=sinks)
    for b, length in enumerate(problem.kv_len):
        for slot in range(sinks, length - window):
            page = int(problem.page_table[b, slot // 16])
            problem.k_pages[page, :, slot % 16] = torch.nan
            problem.v_pages[page, :, slot % 16] = torch.nan
    got = attend(problem, exact=False)
    assert not got.isnan().any()
    assert_close(problem, differs=window > 1 or sinks > 0)


@needs_products
def test_caps_sinks_and_long_prompts() -> None:
    assert_close(problem_of(6, softcap=3.0))
    assert_close(problem_of(7, sinks=True, tree="random"))
    assert_close(problem_of(8, kv_len=[1500], rows=[300], num_heads=2, num_kv_heads=1))
    first = dataclasses.replace(problem_of(9, kv_len=[80, 40], rows=[20, 20]), first_key=33)
    assert_close(first)


@needs_products
def test_threads_and_neighbours_change_no_bit() -> None:
    """A row's bits depend on its own request alone."""
    problem = problem_of(10, tree="random")
    expected = attend(problem, exact=False)
    for count in (1, 2, 5):
        with threads(count):
            assert_same_bits(attend(problem, exact=False), expected)
    last = dataclasses.replace(
        problem, q=problem.q[50:], page_table=problem.page_table[2:], kv_len=[64], rows=[9],
        parents=[problem.parents[2]],
    )  # fmt: skip
    assert_same_bits(attend(last, exact=False), expected[50:])


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": F16}, {"kv_dtype": F32}, {"head_dim": 80}, {"rows": [3, 1, 2]},
        {"rows": [3, 1, 2], "tree": "star"},
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_are_exact(options: dict[str, Any]) -> None:
    problem = problem_of(11, **options)
    assert_same_bits(attend(problem, exact=False), attend(problem))


@pytest.mark.skipif(
    _core.cpu_isa() in ("amx", "avx512_bf16"), reason="a processor with products in bf16"
)
def test_without_products_in_bf16_all_attention_is_exact() -> None:
    problem = problem_of(12, tree="random")
    assert_same_bits(attend(problem, exact=False), attend(problem))
