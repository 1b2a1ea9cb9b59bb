"""Calls of specdec_ext.ops on the problems of reference_attention.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from reference_attention import Problem

from specdec_ext import ops


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed_mask(problem: Problem) -> torch.Tensor | None:
    """[R, W] words of all requests, W as wide as the largest tree needs."""
    if problem.parents is None:
        return None
    words = [ops.mask_from_parents(p).view(torch.int32) for p in problem.parents]
    width = max(w.shape[1] for w in words)
    mask = torch.cat([torch.nn.functional.pad(w, (0, width - w.shape[1])) for w in words])
    return mask.view(torch.uint32)


def attend(problem: Problem, *, exact: bool = True) -> torch.Tensor:
    """spec_attention into a poisoned output whose rows lie inside wider rows."""
    rows, heads, head_dim = problem.q.shape
    wide = torch.full((rows, heads * head_dim + 8), torch.nan, dtype=problem.q.dtype)
    out = wide[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    result = ops.spec_attention(
        problem.q,
        problem.k_pages,
        problem.v_pages,
        problem.page_table,
        int32(problem.kv_len),
        int32(problem.cu_rows),
        mask=packed_mask(problem),
        out=out,
        scale=problem.scale,
        sliding_window=problem.sliding_window,
        sink_tokens=problem.sink_tokens,
        first_key=problem.first_key,
        softcap=problem.softcap,
        sinks=problem.sinks,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        exact=exact,
    )
    assert result is out
    assert wide[:, heads * head_dim :].isnan().all(), "wrote past the rows of out"
    return out.clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns: NaN equals NaN, -0 differs from 0."""
    integer = {4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    differing = int((bits(got) != bits(expected)).sum())
    assert differing == 0, f"{differing} of {got.numel()} elements differ"


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = ops.num_threads()
    ops.set_num_threads(count)
    try:
        yield
    finally:
        ops.set_num_threads(before)
