"""Output that the main pass of fast attention writes itself: of a job that is not cut.

A job that is cut leaves states, which the finish kernel folds. Which of them it is depends on the
number of multiprocessors, and must change no bit and no flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda_calls
import pytest
import torch
from cuda_bounds import check
from cuda_calls import BAD_PAGE, NAN, Target, attend, attend_with_status, checked, emulated_device
from cuda_instances import instance_problem, is_fast, kernels, table
from kernel_calls import assert_same_bits
from reference_attention import Problem

from specdec_ext import ops

FEW, MANY = 1, 64  # multiprocessors: most jobs are whole, or every chunk has a block

fast_kernels = pytest.mark.parametrize(
    "row", [row for row in kernels() if is_fast(row)], ids=lambda row: row.name
)


def results(target: Target, problem: Problem, row: Any) -> list[tuple[torch.Tensor, list[int]]]:
    if target.device != "cpu":
        pytest.skip("a GPU has the multiprocessors it has")
    found = []
    for count in (FEW, MANY):
        with emulated_device(count, major=9 if row.family == "hopper" else 8):
            found.append(attend_with_status(target, problem, instance=row.name, exact=False))
    return found


def problem_of(row: Any, **options: Any) -> Problem:
    """Two requests of several chunks, one of few keys; heads of a token in two row blocks."""
    settings = {
        "kv_len": [900, 530, 20], "rows": [7, 2, 3], "tree": "random", "num_heads": 6,
        "num_kv_heads": 2, "sinks": True,
    }  # fmt: skip
    return instance_problem(row, 3, **{**settings, **options})


@fast_kernels
@checked
def test_the_bits_are_those_of_the_finish_kernel(target: Target, row: Any) -> None:
    for options in (
        {},
        {"tree": None, "sinks": False, "softcap": 3.0},
        {"tree": None, "sliding_window": 300, "sink_tokens": 290},
    ):
        problem = problem_of(row, **options)
        if problem.sinks is not None and problem.parents is None:
            problem.sinks.mul_(20)  # some above every score
        (whole, flags), (cut, _) = results(target, problem, row)
        assert not any(flags)
        assert_same_bits(whole, cut)
        check(target, problem, instance=row.name, exact=False)


def infinite_value(problem: Problem) -> None:
    """One number of V of a head, for all rows of request 0: one lane of four meets it."""
    where = int(problem.page_table[0, 1]), 1, 3, 5
    pages = problem.v_pages
    narrow = pages.element_size() == 1
    pages.view(torch.uint8 if narrow else torch.int16)[where] = 0x7F if narrow else 0x7FFF


def infinite_query(problem: Problem) -> None:
    """The second head of one row of request 1."""
    problem.q[problem.cu_rows[1] + 1, 1] = torch.inf


def wild_page(problem: Problem) -> None:
    problem.page_table[0, 2] = 2**31 - 1


@pytest.mark.parametrize(
    ("damage", "request_flagged", "flag"),
    [(infinite_value, 0, NAN), (infinite_query, 1, NAN), (wild_page, 0, BAD_PAGE)],
    ids=["value", "query", "page"],
)
@fast_kernels
@checked
def test_what_is_bad_becomes_zeros_and_a_flag(
    target: Target, row: Any, damage: Callable[[Problem], None], request_flagged: int, flag: int
) -> None:
    problem = problem_of(row)
    clean = results(target, problem, row)[0][0]
    damage(problem)
    (whole, whole_flags), (cut, cut_flags) = results(target, problem, row)
    assert whole_flags == cut_flags
    assert whole_flags == [flag if b == request_flagged else 0 for b in range(3)]
    assert_same_bits(whole, cut)
    assert bool(torch.isfinite(whole).all())
    mine = slice(*problem.cu_rows[request_flagged : request_flagged + 2])
    assert bool((whole[mine] == 0).all(dim=2).any())
    others = torch.ones(len(whole), dtype=torch.bool)
    others[mine] = False
    assert_same_bits(whole[others], clean[others])


@fast_kernels
@checked
def test_a_wrong_path_becomes_zeros_though_the_main_pass_has_written(
    target: Target, row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finish kernel checks masks; the row's output is there by then."""
    problem = problem_of(row)
    clean = results(target, problem, row)[0][0]
    mask_of = cuda_calls.device_mask

    def wrong(problem: Problem) -> torch.Tensor | None:
        mask = mask_of(problem)
        assert mask is not None
        mask.view(torch.int32)[problem.cu_rows[0] + 4, 0] = 0b1
        return mask

    monkeypatch.setattr(cuda_calls, "device_mask", wrong)
    found = results(target, problem, row)
    assert [flags for _, flags in found] == [[cuda_calls.BAD_TREE, 0, 0]] * 2
    for out, _ in found:
        assert bool((out[4] == 0).all())
        assert_same_bits(out[5:], clean[5:])


@pytest.mark.parametrize(("tokens", "cut"), [(200, False), (900, True)])
@pytest.mark.parametrize("exact", [False, True])
@fast_kernels
@checked
def test_sums_are_written_only_for_the_finish_kernel(
    target: Target,
    row: Any,
    exact: bool,
    tokens: int,
    cut: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if target.device != "cpu":
        pytest.skip("the device's limits are the emulator's")
    workspaces: list[torch.Tensor] = []
    poisoned = cuda_calls.poisoned_workspace

    def kept(*arguments: Any) -> torch.Tensor | None:
        workspace = poisoned(*arguments)
        assert workspace is not None
        workspaces.append(workspace)
        return workspace

    monkeypatch.setattr(cuda_calls, "poisoned_workspace", kept)
    problem = problem_of(row, kv_len=[tokens], rows=[2], num_heads=2, num_kv_heads=1)
    with emulated_device(MANY, major=9 if row.family == "hopper" else 8):
        attend(target, problem, instance=row.name, exact=exact)
        plan = ops.plan_workspace(shape_of(problem), ops.device_limits(target.backend), row.name)
    sums = plan["max_slots"] * row.row_tile * row.head_dim * 4  # the last of the workspace
    assert 0 < sums < len(workspaces[0])
    left = bool((workspaces[0][-sums:] != 0xFF).any())
    assert left == (exact or cut)


def shape_of(problem: Problem) -> ops.AttentionProblem:
    return ops.AttentionProblem(
        num_heads=problem.q.shape[1],
        num_kv_heads=problem.k_pages.shape[1],
        head_dim=problem.q.shape[2],
        dtype=problem.q.dtype,
        kv_dtype=problem.k_pages.dtype,
        page_size=problem.k_pages.shape[2],
        num_requests=len(problem.rows),
        num_rows=sum(problem.rows),
        max_rows=max(problem.rows),
        max_kv_len=max(c + n for c, n in zip(problem.kv_len, problem.rows, strict=True)),
    )


@pytest.mark.parametrize("row", [row for row in table() if is_fast(row)], ids=lambda row: row.name)
@checked
def test_every_instance_writes_the_same_bits(target: Target, row: Any) -> None:
    """Head dims that are no multiple of 32 columns, 256 wide ones, several warps and consumers."""
    problem = instance_problem(
        row, 5, kv_len=[300] * 6, rows=[2] * 6, num_heads=3, num_kv_heads=1, sinks=True
    )
    (whole, flags), (cut, _) = results(target, problem, row)
    assert not any(flags)
    assert_same_bits(whole, cut)
