"""Pools whose pages, and layers, lie more than 2^31 elements apart: no index of them fits 32 bits.

The memory is reserved, not filled: a test touches a few pages of it. Emulated only, as no device
reserves without filling.
"""

from __future__ import annotations

import dataclasses
import mmap
import random
from typing import Any

import pytest
import torch
from cuda_calls import FAST, ON_EMU_FAST, attend
from cuda_instances import each_kernel, instance_problem
from cuda_pools import F16, assert_same, make_pool
from cuda_problems import places
from kernel_calls import assert_same_bits, int32
from reference_attention import shuffled_pages

from emulators import EMULATED
from specdec_ext import ops

MAP_NORESERVE = 0x4000  # Linux; the module has no name for it before Python 3.13
FAR = 2**31 + 2**13  # elements, from one page or layer to the next
on_emulator = pytest.mark.parametrize("target", [ON_EMU_FAST])


def far_apart(pages: torch.Tensor, axes: int = 1) -> torch.Tensor:
    """A copy whose first axis, or first two axes, have strides beyond 2^31."""
    strides = list(pages.contiguous().stride())
    strides[axes - 1] = FAR
    if axes == 2:
        strides[0] = FAR * pages.shape[1] + 2**12
    last = sum((n - 1) * stride for n, stride in zip(pages.shape, strides, strict=True))
    size = (last + 1) * pages.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    held = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    far = held.view(pages.dtype).as_strided(pages.shape, strides)
    raw = torch.int16 if pages.element_size() == 2 else torch.uint8
    for index in range(pages.shape[0]):
        far[index].view(raw).copy_(pages[index].view(raw))
    return far


@each_kernel
@EMULATED
def test_attention_over_pages_far_apart(row: Any) -> None:
    problem = instance_problem(
        row, 21, kv_len=[150, 40], rows=[5, 3], tree="star", max_depth=4, page_size=32
    )
    near = attend(FAST, problem, instance=row.name, max_depth=4)
    k, v = far_apart(problem.k_pages), far_apart(problem.v_pages)
    far = dataclasses.replace(problem, k_pages=k, v_pages=v)
    assert_same_bits(attend(FAST, far, instance=row.name, max_depth=4), near)


@on_emulator
def test_append_to_pages_far_apart(target: Any) -> None:
    pool = make_pool(3, 16, 64, F16)
    k, v = torch.randn(2, sum(pool.rows), 3, 64, generator=torch.Generator().manual_seed(1)).half()
    got_k, got_v = far_apart(pool.k), far_apart(pool.v)
    ops.append_kv(k, v, got_k, got_v, **pool.geometry(target), backend=target.backend)
    assert_same(got_k, pool.written("k", k))
    assert_same(got_v, pool.written("v", v))


@on_emulator
def test_rotated_append_to_pages_far_apart(target: Any) -> None:
    pool = make_pool(3, 16, 64, F16)
    num_rows = sum(pool.rows)
    q, k, v = torch.randn(3, num_rows, 3, 64, generator=torch.Generator().manual_seed(2)).half()
    positions = int32([n % 9 for n in range(num_rows)])
    angles = torch.rand(9, 32, generator=torch.Generator().manual_seed(3)) * 6
    got_k, got_v = far_apart(pool.k), far_apart(pool.v)
    near_k, near_v = pool.k.clone(), pool.v.clone()
    for to_k, to_v in ((got_k, got_v), (near_k, near_v)):
        ops.rope_append_kv(
            q, k, v, to_k, to_v, **pool.geometry(target), positions=positions,
            q_out=torch.empty_like(q), cos=angles.cos(), sin=angles.sin(), backend=target.backend,
        )  # fmt: skip
    assert_same(got_k, near_k)
    assert_same(got_v, near_v)
    assert_same(got_v, pool.written("v", v))


@on_emulator
@pytest.mark.parametrize("axes", [1, 2])
def test_compaction_of_pages_and_layers_far_apart(target: Any, axes: int) -> None:
    rows, kv_len, page_size = [9, 5], [20, 3], 4
    table, num_pages = shuffled_pages(random.Random(2), kv_len, rows, page_size)
    gen = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, 2, num_pages, 2, page_size, 8, generator=gen).half()
    path = int32([[3, 7], [2, 4]])

    def after(pages: torch.Tensor) -> torch.Tensor:
        out = pages.clone()
        for b, kept in enumerate(path.tolist()):
            to = places(table[b], range(kv_len[b] + 1, kv_len[b] + 3), page_size)
            page, slot = places(table[b], [kv_len[b] + node for node in kept], page_size)
            out[:, to[0], :, to[1]] = pages[:, page, :, slot]
        return out

    got_k, got_v = far_apart(k, axes), far_apart(v, axes)
    paths = torch.zeros(2, 128, dtype=torch.int32)
    paths[:, :2] = path
    ops.compact_kv(
        got_k,
        got_v,
        table,
        int32(kv_len),
        int32([0, 9, 14]),
        paths,
        int32([2, 2]),
        num_rows=14,
        max_kv_len=29,
        backend=target.backend,
    )
    assert torch.equal(got_k, after(k))
    assert torch.equal(got_v, after(v))
