"""Layers of one step share a plan: the main pass then begins before the append in front of it ends.

On the checked emulation a read of what that append writes, before the wait for it, is an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import (
    Target,
    attend,
    checked,
    device_mask,
    geometry,
    is_tree,
    poisoned_workspace,
)
from cuda_instances import instance_problem, kernels
from cuda_problems import places, to_device
from kernel_calls import assert_same_bits
from reference_attention import Problem

from specdec_ext import ops


def step_rows(problem: Problem, pages: torch.Tensor) -> torch.Tensor:
    """K or V [R, G, K] of the step's own rows, which `pages` then holds no more."""
    taken = []
    for b, (begin, count) in enumerate(zip(problem.kv_len, problem.rows, strict=True)):
        page, slot = places(problem.page_table[b], range(begin, begin + count), pages.shape[2])
        taken.append(pages[page, :, slot].clone())
        pages[page, :, slot] = torch.nan
    return torch.cat(taken)


@pytest.mark.parametrize(
    ("kv_len", "rows"),
    [
        ([200, 3, 64, 127], [5, 2, 1, 3]),  # tiles of 64 keys that are the step's in part, or not
        ([0, 2], [3, 4]),  # exact: nothing but tails, no unit of the main pass
        ([700], [40]),  # cut, several row tiles
    ],
)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "row", [row for row in kernels() if row.kv_dtype == row.dtype], ids=lambda row: row.name
)
@checked
def test_the_second_layer_waits_for_its_own_keys(
    target: Target, row: Any, exact: bool, kv_len: list[int], rows: list[int]
) -> None:
    options: dict[str, Any] = {"exact": exact, "max_depth": 15, "instance": row.name}
    problem = instance_problem(row, 5, kv_len=kv_len, rows=rows, tree="random", max_depth=15)
    wanted = attend(target, problem, **options)

    device = to_device(problem, target.device)
    mask, where = device_mask(problem), geometry(target, problem)
    trees = [is_tree(problem, b) for b in range(len(rows))]
    workspace = poisoned_workspace(target, problem, row.name)
    k_pages, v_pages = device.k_pages.clone(), device.v_pages.clone()
    k, v = step_rows(problem, k_pages), step_rows(problem, v_pages)

    def layer(keys: torch.Tensor, values: torch.Tensor, *, reuse_plan: bool) -> torch.Tensor:
        out = torch.full_like(device.q, torch.nan)
        return ops.spec_attention(
            device.q, keys, values, **where, mask=None if mask is None else target.put(mask),
            is_tree=target.put(torch.tensor(trees, dtype=torch.uint8)), out=out,
            scale=problem.scale, backend=target.backend, workspace=workspace,
            reuse_plan=reuse_plan, **options,
        )  # fmt: skip

    layer(device.k_pages, device.v_pages, reuse_plan=False)
    ops.append_kv(k, v, k_pages, v_pages, **where, backend=target.backend)
    assert_same_bits(layer(k_pages, v_pages, reuse_plan=True).cpu(), wanted)
