"""Bits of the accelerator's attention against themselves (docs/exactness.md).

First what tensor cores have to grant: a score depends neither on its row nor on its column. Then
the promise: a row at position p has the bits of p decoded alone, with all of its path committed.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from cuda_calls import (
    Target,
    attend,
    checked,
    emulated_device,
    fast,
)
from cuda_instances import (
    each_family,
    each_kernel,
    instance_problem,
    is_fast,
    table,
    tiles_of,
)
from cuda_problems import TREES, part, places, put, replay
from kernel_calls import assert_same_bits, bits
from reference_attention import Problem

# -- A score depends on neither row nor column -----------------------------------------------------


@pytest.mark.parametrize("row", tiles_of(64), ids=lambda row: row.name)
@pytest.mark.parametrize("exact", [True, False])
@checked
def test_rows_do_not_matter(target: Target, row: Any, exact: bool) -> None:
    """The leaves of a star, all alike, fill every row of more than one tile with one query.

    In fast arithmetic a leaf's own key counts in its slot's column, so only its heads are alike.
    """
    leaves, group = 128, 3
    problem = instance_problem(
        row,
        1,
        kv_len=[135],
        rows=[leaves],
        tree="star",
        max_depth=1,
        num_heads=group,
        num_kv_heads=1,
    )
    problem.q[:] = problem.q[0, 0].clone()
    page, slot = places(problem.page_table[0], range(136, 135 + leaves), 16)
    for pages in (problem.k_pages, problem.v_pages):
        put(pages, page, slot, pages[page[:1], :, slot[:1]].expand(len(page), -1, -1))
    out = attend(target, problem, instance=row.name, exact=exact, max_depth=1)
    first = out[1:2, :1] if exact else out[1:, :1]
    assert_same_bits(out[1:], first.expand(leaves - 1, group, -1))


def one_key_at(row: Any, columns: list[int], kv_len: int) -> Problem:
    """Requests of one row that differ in where one visible key lies; all others but the row's own
    weigh exactly nothing (their score is 1000 lower)."""
    problem = instance_problem(
        row,
        2,
        kv_len=[kv_len] * len(columns),
        rows=[1] * len(columns),
        num_heads=2,
        num_kv_heads=1,
        page_size=16,
    )
    problem.q[:] = problem.q[0, 0].clone()
    query = problem.q[0, 0].float()
    far = -1000.0 / problem.scale / query.square().sum() * query
    gen = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, 1, query.numel(), generator=gen)
    for b, column in enumerate(columns):
        page, slot = places(problem.page_table[b], range(kv_len), 16)
        put(problem.k_pages, page, slot, far.expand(kv_len, 1, -1))
        put(problem.k_pages, page[column : column + 1], slot[column : column + 1], k[None])
        put(problem.v_pages, page[column : column + 1], slot[column : column + 1], v[None])
        page, slot = places(problem.page_table[b], [kv_len], 16)
        put(problem.k_pages, page, slot, -k[None])
        put(problem.v_pages, page, slot, v.flip(1)[None])
    return problem


@each_kernel
@pytest.mark.parametrize("exact", [True, False])
@checked
def test_columns_do_not_matter(target: Target, row: Any, exact: bool) -> None:
    """A key counts the same in every column of a block, in every block and chunk.

    In fast arithmetic the row's own key is in the second chunk, where it would share a maximum.
    """
    columns = [*range(64), 64, 127, 128, 200, 255, 256, 257, 263, 300, 319]
    columns = columns if exact else [c for c in columns if c < 256]
    problem = one_key_at(row, columns, kv_len=328)
    out = attend(target, problem, instance=row.name, exact=exact, max_depth=8)
    assert bool((out[0, 0] != 0).any())
    assert_same_bits(out, out[:1, :1].expand_as(out))


# -- A row has the bits of plain decoding ----------------------------------------------------------

CASES: list[dict[str, Any]] = [
    dict(kv_len=[0], rows=[40], tree="random"),
    dict(kv_len=[150], rows=[84], tree="medusa", max_depth=12),
    dict(kv_len=[63, 64, 65], rows=[20, 33, 12], tree="deep", max_depth=16),
    dict(kv_len=[270], rows=[128], tree="random", max_depth=40, num_heads=9, num_kv_heads=3),
    dict(kv_len=[33, 262], rows=[30, 5], tree="star", max_depth=1, page_size=64),
    dict(
        kv_len=[190],
        rows=[50],
        tree="deep",
        max_depth=50,
        sliding_window=71,
        softcap=5.0,
        sinks=True,
    ),
    dict(kv_len=[170], rows=[50], tree="chain", max_depth=60, sliding_window=7),
    dict(
        kv_len=[330, 3], rows=[40, 30], tree="deep", max_depth=30, sliding_window=9, sink_tokens=21
    ),
    dict(kv_len=[600], rows=[50], max_depth=12, sliding_window=140, sink_tokens=70),
    dict(kv_len=[190, 3], rows=[60, 70], max_depth=33, softcap=2.0),
    dict(kv_len=[320], rows=[90], sliding_window=140, max_depth=5, num_heads=3, num_kv_heads=1),
    dict(kv_len=[517, 0], rows=[27, 1], tree="binary", max_depth=8, num_heads=5, num_kv_heads=1),
]


def assert_replayed(
    target: Target, row: Any, problem: Problem, max_depth: int, picked: int
) -> None:
    """Rows of the problem, first and last of each request among them, against plain decoding."""
    out = attend(target, problem, instance=row.name, max_depth=max_depth)
    nodes = [(b, i) for b, n in enumerate(problem.rows) for i in range(n)]
    chosen = {i for i, (b, row) in enumerate(nodes) if row in (0, problem.rows[b] - 1)}
    rest = [i for i in range(len(nodes)) if i not in chosen]
    chosen |= set(random.Random(0).sample(rest, min(picked, len(rest))))
    at = sorted(chosen)
    alone = attend(
        target,
        replay(problem, [nodes[i] for i in at]),
        instance=row.name,
        max_depth=max_depth,
    )
    wrong = [
        nodes[i] for i, got in zip(at, alone, strict=True) if (bits(got) != bits(out[i])).any()
    ]
    assert not wrong, f"{len(wrong)} of {len(at)} rows differ from plain decoding: {wrong[:8]}"


@pytest.mark.parametrize("case", range(len(CASES)))
@each_family
@fast
def test_every_row_has_the_bits_of_plain_decoding(target: Target, row: Any, case: int) -> None:
    settings = {"max_depth": 127, **CASES[case]}
    problem = instance_problem(row, case, **settings)
    assert_replayed(target, row, problem, settings["max_depth"], picked=24)


@pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
@fast
def test_every_instance_has_the_bits_of_plain_decoding(target: Target, row: Any) -> None:
    problem = instance_problem(
        row,
        3,
        kv_len=[280, 40],
        rows=[25, 9],
        tree=["medusa", "chain"],
        max_depth=9,
        num_heads=4,
        num_kv_heads=1,
    )
    assert_replayed(target, row, problem, 9, picked=8)


@each_family
@checked
def test_alone_equals_in_a_batch(target: Target, row: Any) -> None:
    rng = random.Random(4)
    rows = [1, 9, 0, 30, 2, 17]
    kv_len = [rng.choice([0, 60, 150, 270]) for _ in rows]
    problem = instance_problem(
        row, 4, kv_len=kv_len, rows=rows, tree="random", num_heads=2, num_kv_heads=1
    )
    for exact in (True, False):
        out = attend(target, problem, instance=row.name, exact=exact, max_depth=20)
        for b, n in enumerate(rows):
            if n:
                one = part(problem, b, 0, n)
                alone = attend(target, one, instance=row.name, exact=exact, max_depth=20)
                assert_same_bits(alone, out[problem.cu_rows[b] : problem.cu_rows[b + 1]])


@each_family
@fast
def test_how_a_prompt_is_cut_does_not_matter(target: Target, row: Any) -> None:
    problem = instance_problem(
        row, 5, kv_len=[45], rows=[260], num_heads=2, num_kv_heads=1, sliding_window=190
    )
    rng = random.Random(5)
    for max_depth in (8, 127):
        whole = attend(target, problem, instance=row.name, max_depth=max_depth)
        for sizes in ([64] * 4 + [4], [200, 60], [rng.randint(1, 40) for _ in range(30)]):
            begin = 0
            for size in sizes:
                end = min(260, begin + size)
                if begin < end:
                    rows = part(problem, 0, begin, end)
                    got = attend(target, rows, instance=row.name, max_depth=max_depth)
                    assert_same_bits(got, whole[begin:end])
                begin = end
        assert_replayed(target, row, problem, max_depth, picked=30)


@each_family
@fast
def test_a_chain_equals_the_same_chain_given_as_a_tree(target: Target, row: Any) -> None:
    problem = instance_problem(row, 6, kv_len=[177], rows=[100], tree="chain")
    causal = dataclasses.replace(problem, parents=None)
    expected = attend(target, causal, instance=row.name)
    assert_same_bits(attend(target, problem, instance=row.name), expected)


# -- Scheduling does not change a bit --------------------------------------------------------------


@each_kernel
@checked
def test_the_number_of_sms_does_not_matter(target: Target, row: Any) -> None:
    """From one block that walks everything to one chunk for each block."""
    if target.device != "cpu":
        pytest.skip("a GPU has the multiprocessors it has")
    problem = instance_problem(
        row, 7, kv_len=[1500, 20, 300], rows=[3, 9, 1], tree="random", num_kv_heads=1, num_heads=2
    )
    for exact in (True, False):
        results = []
        for count in (1, 2, 3, 7, 132):
            with emulated_device(count):
                results.append(attend(target, problem, instance=row.name, exact=exact, max_depth=8))
        for result in results[1:]:
            assert_same_bits(result, results[0])


@pytest.mark.parametrize("family", sorted({row.family for row in table() if is_fast(row)}))
@fast
def test_the_row_tile_does_not_matter(target: Target, family: str) -> None:
    rows = [row for row in tiles_of(64) if row.family == family]
    assert len({row.row_tile for row in rows}) > 1
    problem = instance_problem(
        rows[0], 8, kv_len=[290, 70], rows=[70, 33], tree="random", num_heads=4, num_kv_heads=1
    )
    for exact in (True, False):
        results = [
            attend(target, problem, instance=row.name, exact=exact, max_depth=30) for row in rows
        ]
        for result in results[1:]:
            assert_same_bits(result, results[0])


@each_family
@fast
def test_page_size_does_not_matter(target: Target, row: Any) -> None:
    """The same tokens in pages of another size, in other places."""
    results = []
    for page_size in (16, 32, 64, 128):
        problem = instance_problem(
            row,
            9,
            kv_len=[270, 90],
            rows=[12, 5],
            tree="random",
            num_heads=2,
            num_kv_heads=1,
            page_size=page_size,
        )
        results.append(attend(target, problem, instance=row.name, max_depth=8))
    for result in results[1:]:
        assert_same_bits(result, results[0])


# -- Random problems -------------------------------------------------------------------------------


def random_case(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    tree = [rng.choice(TREES) for _ in range(count)] if rng.random() < 0.7 else None
    num_kv_heads = rng.choice([1, 1, 2])
    return dict(
        kv_len=[rng.choice([0, rng.randint(1, 80), rng.randint(1, 600)]) for _ in range(count)],
        rows=[rng.choice([0, 1, rng.randint(2, 20), rng.randint(2, 128)]) for _ in range(count)],
        tree=tree,
        max_depth=rng.choice([1, 8, 16, 17, 64, 127]),
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 4, 8]),
        num_kv_heads=num_kv_heads,
        page_size=rng.choice([16, 32, 64, 128]),
        sliding_window=rng.choice([0, 0, 0, rng.randint(1, 300)]),
        softcap=rng.choice([0.0, 0.0, 10.0]),
        sinks=rng.random() < 0.3,
        spread=rng.choice([0.1, 1.0, 10.0]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
@fast
def test_random_problems(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    case = random_case(seed)
    if not any(case["rows"]):
        case["rows"][0] = 1
    row = rng.choice(table())
    problem = instance_problem(row, seed, **case)
    assert_replayed(target, row, problem, case["max_depth"], picked=20)
