"""Speculative attention of the accelerator against float64, every instance of the table.

Every problem is hostile (cuda_problems.py, cuda_calls.py): NaN in all unused K/V, in the workspace
and in the output before the call, wild page ids, shuffled and shared pages, strided rows. One
element outside the bound, or NaN, or a status flag, fails.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from cuda_bounds import BF16, F16, check
from cuda_calls import Target, attend, checked, fast, needs_cuda
from cuda_instances import each_family, each_kernel, instance_problem, table
from cuda_problems import F8, TREES, hostile_problem
from kernel_calls import assert_same_bits
from reference_attention import attend as reference
from reference_attention import dense_attend, gather, random_problem, rival_attend

# -- The reference itself --------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", [F16, F8])
def test_both_references_agree(kv_dtype: torch.dtype) -> None:
    problem = hostile_problem(
        1,
        kv_len=[70, 0, 33],
        rows=[9, 21, 0],
        tree=["medusa", "deep", "star"],
        kv_dtype=kv_dtype,
        scales=2 if kv_dtype == F8 else 0,
        head_dim=16,
        shared_pages=2,
        sliding_window=60,
        softcap=3.0,
        sinks=True,
    )
    assert float((dense_attend(problem)[0] - reference(problem)).abs().max()) < 1e-13


def test_the_rival_is_as_good_as_torch() -> None:
    """The bound's rival errs no more than torch's own attention in the same dtype."""
    problem = random_problem(2, kv_len=[300], rows=[8], num_heads=2, num_kv_heads=2, dtype=BF16)
    exact = dense_attend(problem)[0]
    pages = [
        gather(stored, problem.page_table[0], 308)[None].transpose(1, 2)
        for stored in (problem.k_pages, problem.v_pages)
    ]
    mask = torch.ones(8, 308, dtype=torch.bool).tril(300)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        problem.q.transpose(0, 1)[None], *pages, attn_mask=mask, scale=problem.scale
    )[0].transpose(0, 1)
    error = float((theirs.double() - exact).abs().mean())
    assert float((rival_attend(problem).double() - exact).abs().mean()) <= 1.1 * error


# -- Every instance --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
@checked
def test_every_instance(target: Target, row: Any) -> None:
    """One ragged batch of trees, one of chains; exact and fast arithmetic, heads in odd groups."""
    for seed, (tree, exact) in enumerate([("random", True), (None, False)]):
        problem = instance_problem(
            row,
            seed,
            kv_len=[33, 0, 197],
            rows=[17, 3, 6],
            tree=tree,
            max_depth=24,
            num_heads=3,
            num_kv_heads=1,
        )
        check(target, problem, instance=row.name, exact=exact, max_depth=24)


EDGES = sorted(
    {0, 1, 2} | {edge + d for edge in (16, 32, 64, 128, 192, 256, 320, 512) for d in (-1, 0, 1)}
)


@pytest.mark.parametrize("exact", [True, False])
@each_kernel
@checked
def test_lengths_around_every_edge(target: Target, row: Any, exact: bool) -> None:
    """Tiles of 16 and 64 keys, chunks of 256, pages of 32; the depth bound shifts them by 5."""
    for kv_len, rows in (
        (EDGES, [1] * len(EDGES)),
        (EDGES[::2], [2 + i % 3 for i in range(len(EDGES[::2]))]),
        ([max(0, e - 5) for e in EDGES[1::3]], [6] * len(EDGES[1::3])),
    ):
        problem = instance_problem(
            row,
            3,
            kv_len=list(kv_len),
            rows=rows,
            tree=None if rows[0] == 1 else "random",
            max_depth=5,
            num_heads=1,
            num_kv_heads=1,
            page_size=32,
        )
        check(target, problem, instance=row.name, exact=exact, max_depth=5)


@each_kernel
@checked
def test_hard_cases(target: Target, row: Any) -> None:
    """Several at once: window, soft cap, sinks, heads of one token in two tiles, shared pages."""
    for seed, options in enumerate(
        (
            {"tree": ["random", "medusa", "chain", "star"]},
            {"tree": None, "sliding_window": 70, "softcap": 4.0, "sinks": True},
            {"tree": "deep", "sliding_window": 9, "sinks": True, "spread": 4.0},
        )
    ):
        problem = instance_problem(
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
            check(target, problem, instance=row.name, exact=exact, max_depth=10)


@pytest.mark.parametrize("page_size", [16, 64])
@each_kernel
@fast
def test_past_every_window(target: Target, row: Any, page_size: int) -> None:
    """Longer than what a kernel looks up at a time, and than the chunks of 256 keys."""
    problem = instance_problem(
        row,
        4,
        kv_len=[2700, 2040],
        rows=[2, 9],
        tree="random",
        max_depth=4,
        num_heads=1,
        num_kv_heads=1,
        page_size=page_size,
    )
    for exact in (True, False):
        check(target, problem, instance=row.name, exact=exact, max_depth=4)


@pytest.mark.parametrize("tree", TREES)
@each_family
@fast
def test_trees_of_every_shape_and_mask_word(target: Target, row: Any, tree: str) -> None:
    sizes = [1, 2, 31, 32, 33, 63, 64, 65, 84, 127, 128]
    for exact in (True, False):
        problem = instance_problem(
            row,
            len(tree),
            kv_len=[(37 * n) % 150 for n in sizes],
            rows=sizes,
            tree=tree,
            num_heads=1,
            num_kv_heads=1,
        )
        check(target, problem, instance=row.name, exact=exact)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 16, 64])
@each_family
@fast
def test_head_ratios(target: Target, row: Any, group: int) -> None:
    for rows in ([1], [5, 26]):
        problem = instance_problem(
            row,
            group,
            kv_len=[140, 3][: len(rows)],
            rows=rows,
            tree="random",
            max_depth=20,
            num_heads=2 * group,
            num_kv_heads=2,
        )
        check(target, problem, instance=row.name, max_depth=20)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128])
@each_family
@fast
def test_page_sizes(target: Target, row: Any, page_size: int) -> None:
    problem = instance_problem(
        row,
        page_size,
        kv_len=[131, 0, 64, 300],
        rows=[7, 33, 1, 2],
        tree="medusa",
        max_depth=12,
        page_size=page_size,
    )
    name = row.name if page_size >= 16 or row.family == "generic" else None
    check(target, problem, instance=name, max_depth=12)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 63, 64, 65, 300])
@each_family
@fast
def test_windows_count_positions(target: Target, row: Any, window: int) -> None:
    for tree in (None, "deep", "star"):
        for exact in (True, False):
            problem = instance_problem(
                row,
                window,
                kv_len=[330, 0, 20],
                rows=[40, 11, 1],
                tree=tree,
                max_depth=40,
                num_heads=2,
                num_kv_heads=1,
                sliding_window=window,
            )
            check(target, problem, instance=row.name, exact=exact, max_depth=40)


@pytest.mark.parametrize(("first_key", "window"), [(1, 0), (1, 30), (17, 0), (64, 3), (70, 200)])
@each_family
@fast
def test_nothing_in_front_of_the_first_key_is_read(
    target: Target, row: Any, first_key: int, window: int
) -> None:
    for tree in (None, "deep"):
        for exact in (True, False):
            problem = instance_problem(
                row,
                first_key,
                kv_len=[330, first_key, first_key + 20],
                rows=[9, 11, 1],
                tree=tree,
                max_depth=12,
                num_heads=2,
                num_kv_heads=1,
                sliding_window=window,
                first_key=first_key,
            )
            check(target, problem, instance=row.name, exact=exact, max_depth=12)


@pytest.mark.parametrize("softcap", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
@each_family
@fast
def test_softcap_and_sinks(target: Target, row: Any, softcap: float, spread: float) -> None:
    for sinks, window in ((False, 0), (True, 0), (True, 70)):
        problem = instance_problem(
            row,
            3,
            kv_len=[175, 0],
            rows=[13, 20],
            tree="deep",
            max_depth=20,
            softcap=softcap,
            spread=spread,
            sinks=sinks,
            sliding_window=window,
        )
        check(target, problem, instance=row.name, max_depth=20)


@each_family
@fast
def test_sinks_can_take_everything(target: Target, row: Any) -> None:
    problem = instance_problem(row, 5, kv_len=[100], rows=[4], sinks=True)
    assert problem.sinks is not None
    problem.sinks.fill_(200.0)  # above every score by far more than float32's range of exp
    out = attend(target, problem, instance=row.name, max_depth=20)
    assert bool((out == 0).all())


@each_family
@fast
def test_one_of_many_requests_is_empty(target: Target, row: Any) -> None:
    rng = random.Random(6)
    rows = [rng.choice([1, 2, 9]) for _ in range(64)]
    rows[17] = rows[63] = 0
    kv_len = [rng.choice([0, 1, 30, 97]) for _ in rows]
    kv_len[17], kv_len[63] = 50, 0
    for tree in (None, [rng.choice(TREES) for _ in rows]):
        problem = instance_problem(
            row, 7, kv_len=kv_len, rows=rows, tree=tree, num_heads=1, num_kv_heads=1
        )
        check(target, problem, instance=row.name, max_depth=9)


@each_family
@checked
def test_two_requests_share_pages(target: Target, row: Any) -> None:
    problem = instance_problem(
        row,
        8,
        kv_len=[150, 20, 140, 128],
        rows=[3, 5, 4, 1],
        tree="binary",
        max_depth=4,
        page_size=16,
        shared_pages=8,
    )
    check(target, problem, instance=row.name, max_depth=4)


@each_family
@fast
def test_prefill(target: Target, row: Any) -> None:
    """More rows than a tree may have, with and without a prefix."""
    problem = instance_problem(row, 9, kv_len=[0, 75], rows=[290, 130], num_heads=2, num_kv_heads=1)
    for max_depth, exact in ((0, True), (16, True), (127, True), (16, False)):
        check(target, problem, instance=row.name, max_depth=max_depth, exact=exact)


@each_family
@fast
def test_pages_may_have_any_outer_strides(target: Target, row: Any) -> None:
    problem = instance_problem(row, 10, kv_len=[70, 3], rows=[9, 5], tree="random")
    expected = attend(target, problem, instance=row.name)
    for order in [(0, 2, 1, 3), (1, 2, 0, 3)]:
        moved = []
        for pages in (problem.k_pages, problem.v_pages):
            copy = pages.permute(order).contiguous()
            moved.append(copy.permute([order.index(i) for i in range(4)]))
        other = dataclasses.replace(problem, k_pages=moved[0], v_pages=moved[1])
        assert not other.k_pages.is_contiguous()
        assert_same_bits(attend(target, other, instance=row.name), expected)


@each_family
@checked
def test_the_same_call_twice_gives_the_same_bits(target: Target, row: Any) -> None:
    problem = instance_problem(row, 11, kv_len=[300, 0], rows=[6, 20], tree="random")
    for exact in (True, False):
        first = attend(target, problem, instance=row.name, exact=exact, max_depth=10)
        again = attend(target, problem, instance=row.name, exact=exact, max_depth=10)
        assert_same_bits(again, first)


# -- Large, on a GPU -------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("context", [8 << 10, 32 << 10, 128 << 10])
@pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
def test_long_contexts(row: Any, context: int) -> None:
    """Where the split over the context has many chunks and blocks."""
    heads = 2 if row.family == "generic" else 8
    for tree, rows in (("random", [64, 27]), (None, [1, 1])):
        problem = instance_problem(
            row,
            14,
            kv_len=[context - 70, context // 3],
            rows=rows,
            tree=tree,
            num_heads=heads,
            num_kv_heads=2,
            page_size=64,
        )
        for exact in (True, False):
            check(Target("cuda", "cuda"), problem, instance=row.name, exact=exact)
