"""Bad data in the accelerator's attention: pages, lengths and numbers that nothing vouches for.

A request with bad data is flagged and the others keep their bits; nothing traps.
"""

from __future__ import annotations

from typing import Any

import torch
from cuda_bounds import check
from cuda_calls import (
    BAD_LENGTH,
    BAD_PAGE,
    NAN,
    Target,
    attend,
    attend_with_status,
    checked,
)
from cuda_instances import each_kernel, instance_problem
from kernel_calls import assert_same_bits
from reference_attention import Problem


@each_kernel
@checked
def test_bad_data_flags_its_request_and_no_other(target: Target, row: Any) -> None:
    def problem() -> Problem:
        return instance_problem(
            row,
            12,
            kv_len=[100, 70, 20, 90],
            rows=[3, 4, 2, 2],
            tree="star",
            max_depth=4,
            page_size=16,
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

    for page in (2**31 - 1, -1, problem().k_pages.shape[0]):
        for index in (0, 2, 4):  # main keys; the last: step tokens
            bad = problem()
            bad.page_table[1, index] = page
            assert bool((broken(bad, 1, BAD_PAGE) == 0).all())

    for slot in (3, 65, 71):  # main part and tail of the prefix, and a node of the tree
        bad = problem()
        where = int(bad.page_table[1, slot // 16]), slice(None), slot % 16
        bad.v_pages.view(torch.int16 if bad.v_pages.element_size() == 2 else torch.uint8)[where] = (
            0x7FFF if bad.v_pages.element_size() == 2 else 0x7F
        )
        broken(bad, 1, NAN)

    bad = problem()
    bad.q[bad.cu_rows[2]] = torch.nan
    broken(bad, 2, NAN)

    for length in (-1, -(2**31)):
        bad = problem()
        bad.kv_len[3] = length
        assert bool((broken(bad, 3, BAD_LENGTH) == 0).all())


@each_kernel
@checked
def test_bad_data_in_the_lengths(target: Target, row: Any) -> None:
    """A length beyond the page table is flagged."""
    problem = instance_problem(row, 13, kv_len=[40, 30], rows=[2, 2], num_heads=2, num_kv_heads=1)
    clean = attend(target, problem, instance=row.name)
    problem.kv_len[1] = problem.page_table.shape[1] * 16 - 1
    out, status = attend_with_status(target, problem, instance=row.name)
    assert status == [0, BAD_LENGTH]
    assert_same_bits(out[:2], clean[:2])
    assert bool((out[2:] == 0).all())


@each_kernel
@checked
def test_bad_data_before_a_window(target: Target, row: Any) -> None:
    """NaN where no row looks any more: in the first block of a window, and in the page before; also
    where a page is longer than a block."""
    for window, exact, page_size in ((70, True, 16), (90, False, 128)):
        problem = instance_problem(
            row,
            14,
            kv_len=[300, 131],
            rows=[2, 3],
            tree="star",
            max_depth=1,
            num_heads=2,
            num_kv_heads=1,
            sliding_window=window,
            page_size=page_size,
        )
        check(target, problem, instance=row.name, exact=exact, max_depth=1)


@each_kernel
@checked
def test_bad_data_in_any_number_of_a_key(target: Target, row: Any) -> None:
    """One number, in K and in V: of e4m3 every one of the 16 that are widened together."""
    narrow = row.kv_dtype == torch.float8_e4m3fn
    for name in ("k_pages", "v_pages"):
        for column in (*range(16 if narrow else 2), row.head_dim - 1):
            bad = instance_problem(row, 14, kv_len=[40, 30], rows=[2, 1])
            pages = getattr(bad, name).view(torch.uint8 if narrow else torch.int16)
            pages[int(bad.page_table[0, 1]), :, 3, column] = 0x7F if narrow else 0x7FFF
            status = attend_with_status(target, bad, instance=row.name)[1]
            assert status == [NAN, 0], (name, column, status)
