"""Sums over chunks that nearly cancel: every rounding of the folds shows in the result.

A fold of a unit's chunks on chip and that of the finish kernel have to be the same operations. In
an ordinary result their last bits vanish when it is rounded to 16 bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import Target, attend, checked, emulated_device
from cuda_instances import each_kernel, instance_problem
from cuda_problems import places, put
from kernel_calls import assert_same_bits
from reference_attention import Problem

CHUNK = 256


def cancelling_problem(row: Any) -> Problem:
    """Keys of the first two chunks have one score, those of the next two a lower one; their values
    take back what the first two have brought, up to their rounding. All other values are 0."""
    tokens, heads = 4 * CHUNK, 2
    problem = instance_problem(
        row, 1, kv_len=[tokens + 30], rows=[4], num_heads=heads, num_kv_heads=heads, page_size=16
    )
    problem.q[:] = problem.q[0, 0].clone()
    query = problem.q[0, 0].float()
    low = -0.7 * torch.log(torch.tensor(2.0)) / problem.scale / query.square().sum() * query
    if problem.k_scale is not None:
        low = low / problem.k_scale[0]
    gen = torch.Generator().manual_seed(1)
    first = torch.randn(2 * CHUNK, heads, query.numel(), generator=gen)
    first = first.to(problem.v_pages.dtype).float()
    where = places(problem.page_table[0], range(tokens), 16)
    is_low = torch.arange(tokens)[:, None, None] >= 2 * CHUNK
    put(problem.k_pages, *where, torch.where(is_low, low, 0 * low).expand(-1, heads, -1))
    put(problem.v_pages, *where, torch.cat([first, -first * 2.0**0.7]))
    rest = places(problem.page_table[0], range(tokens, tokens + 34), 16)
    put(problem.v_pages, *rest, torch.zeros(34, heads, query.numel()))
    return problem


@each_kernel
@checked
def test_the_number_of_sms_does_not_matter_to_sums_that_cancel(target: Target, row: Any) -> None:
    if target.device != "cpu":
        pytest.skip("a GPU has the multiprocessors it has")
    problem = cancelling_problem(row)
    results = []
    for count in (1, 3, 132):
        with emulated_device(count):
            results.append(attend(target, problem, instance=row.name, max_depth=8))
    for result in results[1:]:
        assert_same_bits(result, results[0])
