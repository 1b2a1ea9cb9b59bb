"""Append (plain and fused with norm and rotation) of K/V on every backend.

Copies and roundings are exact, bit by bit, unwritten slots included; what is computed is held
against float64.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from cuda_calls import BAD_LENGTH, BAD_PAGE, Target, checked, every_backend
from cuda_pools import (
    BF16,
    F16,
    F32,
    LENGTHS,
    SPECIAL,
    assert_same,
    halfway,
    make_pool,
    moved,
    raw,
    scales_of,
    stored,
)
from cuda_problems import F8, places
from reference_attention import WILD_PAGE_ID

from specdec_ext import ops

# -- Append ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 16, 128])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("kv_dtype", [F32, BF16, F16, F8])
@every_backend
def test_append(target: Target, page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    pool = make_pool(page_size, page_size, 24, kv_dtype)
    gen = torch.Generator().manual_seed(page_size)
    fused = (torch.randn(53, 2 * 3 * 24 + 5, generator=gen) * 100).to(dtype)
    fused[0, : len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    fused[9, 72 : 72 + len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    k, v = fused[:, :72].unflatten(1, (3, 24)), fused[:, 72:144].unflatten(1, (3, 24))
    scales = scales_of(page_size % 3, 3) if kv_dtype == F8 else {}
    for rows, scale in zip((k, v), scales.values(), strict=False):
        rows[1] = (halfway() * scale[:, None]).to(dtype)
    on_device = target.put(fused)
    got_k, got_v = target.put(pool.k.clone()), target.put(pool.v.clone())
    ops.append_kv(
        on_device[:, :72].unflatten(1, (3, 24)),
        on_device[:, 72:144].unflatten(1, (3, 24)),
        got_k,
        got_v,
        **pool.geometry(target),
        **moved(target, scales),
        backend=target.backend,
    )
    assert_same(got_k, pool.written("k", stored(k, scales.get("k_scale"), kv_dtype)))
    assert_same(got_v, pool.written("v", stored(v, scales.get("v_scale"), kv_dtype)))


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@checked
def test_append_head_dims(target: Target, head_dim: int) -> None:
    """Whole vectors and odd ones; K or V or both in rows that are aligned to nothing but their
    elements."""
    pool = make_pool(head_dim, 16, head_dim, F16)
    gen = torch.Generator().manual_seed(head_dim)
    width = 3 * head_dim
    for k_gaps, v_gaps in (((0, 0), (0, 0)), ((0, 3), (0, 0)), ((0, 0), (1, 2)), ((8, 8), (4, 4))):
        wide = [
            torch.randn(53, width + sum(gaps), generator=gen).half() for gaps in (k_gaps, v_gaps)
        ]
        values, on_device = [
            [
                put(tensor)[:, gaps[0] : gaps[0] + width].unflatten(1, (3, head_dim))
                for tensor, gaps in zip(wide, (k_gaps, v_gaps), strict=True)
            ]
            for put in (torch.clone, target.put)
        ]
        got_k, got_v = target.put(pool.k.clone()), target.put(pool.v.clone())
        ops.append_kv(*on_device, got_k, got_v, **pool.geometry(target), backend=target.backend)
        assert_same(got_k, pool.written("k", values[0]))
        assert_same(got_v, pool.written("v", values[1]))


@checked
def test_append_flags_bad_pages_and_lengths(target: Target) -> None:
    for broken, flag in (("page", BAD_PAGE), ("negative", BAD_LENGTH), ("long", BAD_LENGTH)):
        pool = make_pool(3, 16, 16, F16)
        k = torch.randn(53, 3, 16).half()
        values = k, (k * 2).half()
        expected = [
            pool.written(which, value, skipped=(1,))
            for which, value in zip("kv", values, strict=True)
        ]
        if broken == "page":
            pool.table[1, 0] = WILD_PAGE_ID
        else:
            pool.kv_len[1] = -1 if broken == "negative" else 16 * pool.table.shape[1]
        geometry = {**pool.geometry(target), "max_kv_len": 16 * pool.table.shape[1]}
        status = target.put(torch.zeros(5, dtype=torch.int32))
        got = target.put(pool.k.clone()), target.put(pool.v.clone())
        ops.append_kv(
            *(target.put(value) for value in values),
            *got,
            **geometry,
            backend=target.backend,
            status=status,
        )
        assert status.tolist() == [0, flag, 0, 0, 0]
        for pages, want in zip(got, expected, strict=True):
            assert_same(pages, want)


# -- Norm, rotation and append ---------------------------------------------------------------------


def normed(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, plus_one: bool
) -> torch.Tensor:
    x = x.double()
    if weight is None:
        return x
    w = weight.double() + (1.0 if plus_one else 0.0)
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * w


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """x [R, heads, K] float64; cos, sin [R, rotary_dim / 2]."""
    half = cos.shape[1]
    c, s = cos.double()[:, None], sin.double()[:, None]
    out = x.clone()
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = a * c - b * s, b * c + a * s
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        out[..., :half], out[..., half : 2 * half] = a * c - b * s, b * c + a * s
    return out


ROUNDING = {F32: (2.0**-24, 0.0), BF16: (2.0**-8, 0.0), F16: (2.0**-11, 2.0**-25)}
ROUNDING[F8] = (2.0**-4, 2.0**-10)


def assert_rounded(got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
    """Rounded once from float32 arithmetic whose terms are as large as `size`."""
    unit, smallest = ROUNDING[got.dtype]
    got, exact = got.cpu().double(), exact.double()
    if unit == ROUNDING[F8][0]:
        exact = exact.clamp(-448.0, 448.0)
    bound = 1.001 * unit * exact.abs() + smallest + 2.0**-21 * size
    excess = (got - exact).abs() - bound
    assert bool((excess <= 0).all()), f"worst excess {float(excess.max()):.3g}"


ROPE_CASES: list[dict[str, Any]] = [
    {},
    dict(dtype=BF16, interleaved=True),
    dict(dtype=F32, head_dim=24, rotary_dim=16),
    dict(rotary_dim=32, q_norm=True, k_norm=True),
    dict(dtype=BF16, head_dim=128, k_norm=True, q_norm=True, norm_dtype=BF16, plus_one=True),
    dict(head_dim=256, rotary_dim=64, interleaved=True, q_norm=True),
    dict(head_dim=80, kv_dtype=F8, scales=2, k_norm=True, norm_dtype=F16),
    dict(dtype=BF16, kv_dtype=F8, scales=1, head_dim=96),
    dict(rotary_dim=0, q_norm=True, k_norm=True, head_dim=40),
    dict(num_heads=16, in_place=True),
    dict(num_heads=3, dtype=BF16, kv_dtype=F16, page_size=1),
    dict(lengths=([5, 0], [515, 3]), head_dim=136, num_heads=6),  # a warp takes several heads
]


@pytest.mark.parametrize("case", range(len(ROPE_CASES)))
@every_backend
def test_rope_append(target: Target, case: int) -> None:
    defaults = dict(
        dtype=F16, head_dim=64, rotary_dim=None, num_heads=6, interleaved=False, page_size=16
    )
    c = {**defaults, **ROPE_CASES[case]}
    dtype, head_dim, heads = c["dtype"], c["head_dim"], c["num_heads"]
    kv_dtype = c.get("kv_dtype", dtype)
    rotary = head_dim if c["rotary_dim"] is None else c["rotary_dim"]
    pool = make_pool(case, c["page_size"], head_dim, kv_dtype, c.get("lengths", LENGTHS))
    num_rows = sum(pool.rows)
    rng, gen = random.Random(case), torch.Generator().manual_seed(case)
    widths = [heads * head_dim, 3 * head_dim, 3 * head_dim]
    fused = torch.randn(num_rows, sum(widths) + 8, generator=gen).to(dtype)
    positions = torch.tensor(
        [
            kv + rng.randint(0, n - 1)
            for kv, n in zip(pool.kv_len, pool.rows, strict=True)
            for _ in range(n)
        ],
        dtype=torch.int32,
    )
    angle = torch.arange(600)[:, None] * 10.0 ** (-4.0 * torch.arange(rotary // 2) / max(1, rotary))
    angles = torch.cat([angle.cos(), angle.sin()], dim=1) * 1.1  # one table, as models keep it
    weights = {
        name: torch.randn(head_dim, generator=gen).to(c.get("norm_dtype", F32))
        for name in ("q_norm", "k_norm")
        if c.get(name)
    }
    scales = scales_of(c.get("scales", 0), 3)

    def split(tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = tensor[:, : sum(widths)].split(widths, dim=1)
        return [part.unflatten(1, (-1, head_dim)) for part in parts]

    on_device = target.put(fused.clone())
    q, k, v = split(on_device)
    q_out = (
        q
        if c.get("in_place")
        else target.put(torch.full((num_rows, heads, head_dim), math.nan, dtype=dtype))
    )
    table = target.put(angles)
    got_k, got_v = target.put(pool.k.clone()), target.put(pool.v.clone())
    ops.rope_append_kv(
        q,
        k,
        v,
        got_k,
        got_v,
        **pool.geometry(target),
        positions=target.put(positions),
        q_out=q_out,
        cos=table[:, : rotary // 2] if rotary else None,
        sin=table[:, rotary // 2 :] if rotary else None,
        interleaved=c["interleaved"],
        **moved(target, weights),
        norm_eps=1e-5,
        norm_plus_one=c.get("plus_one", False),
        **moved(target, scales),
        backend=target.backend,
    )
    at = angles[positions.long()]
    cos, sin = at[:, : rotary // 2], at[:, rotary // 2 :]
    results = []
    for x, name in zip(split(fused)[:2], ("q_norm", "k_norm"), strict=True):
        exact = normed(x, weights.get(name), 1e-5, c.get("plus_one", False))
        results.append((rotated(exact, cos, sin, c["interleaved"]), 2 * exact.abs().amax(-1, True)))
    assert_rounded(q_out, *results[0])
    exact, size = results[1]
    if "k_scale" in scales:
        exact, size = exact / scales["k_scale"][:, None], size / scales["k_scale"][:, None]
    for b, first in enumerate(pool.cu_rows[:-1]):
        n = pool.rows[b]
        page, slot = places(
            pool.table[b], range(pool.kv_len[b], pool.kv_len[b] + n), c["page_size"]
        )
        written = got_k.cpu().view(torch.uint8)[page, :, slot].view(kv_dtype)
        rows = slice(first, first + n)
        assert_rounded(written, exact[rows], size[rows].expand_as(exact[rows]))
        got_k.view(torch.uint8)[target.put(page), :, target.put(slot)] = target.put(
            pool.k.view(torch.uint8)[page, :, slot]
        )
    assert_same(got_k, pool.k)  # nothing else was written
    value = stored(split(fused)[2], scales.get("v_scale"), kv_dtype)
    assert_same(got_v, pool.written("v", value))
    if not c.get("in_place"):
        assert torch.equal(raw(on_device.cpu()), raw(fused))


@checked
def test_a_position_outside_the_tables_is_flagged(target: Target) -> None:
    pool = make_pool(1, 16, 16, F16)
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(53, 6, 16, generator=gen).half()
    k = torch.randn(53, 3, 16, generator=gen).half()
    positions = torch.zeros(53, dtype=torch.int32)
    positions[3], positions[5], positions[7] = 100, -1, 99  # of requests 1, 2 and 2
    status = target.put(torch.zeros(5, dtype=torch.int32))
    q_out = target.put(torch.full((53, 6, 16), math.nan, dtype=F16))
    got_k, got_v = target.put(pool.k.clone()), target.put(pool.v.clone())
    ops.rope_append_kv(
        *(target.put(x) for x in (q, k, k)),
        got_k,
        got_v,
        **pool.geometry(target),
        positions=target.put(positions),
        q_out=q_out,
        cos=target.put(torch.ones(100, 8)),
        sin=target.put(torch.zeros(100, 8)),
        backend=target.backend,
        status=status,
    )
    assert status.tolist() == [0, BAD_LENGTH, BAD_LENGTH, 0, 0]
    expected = q.clone()
    expected[[3, 5]] = 0
    assert_same(q_out, expected)
    for got, which in ((got_k, "k"), (got_v, "v")):
        want = pool.written(which, k)
        for b, token in ((1, 5), (2, 131)):
            page, slot = places(pool.table[b], [token], 16)
            raw(want)[page, :, slot] = raw(getattr(pool, which))[page, :, slot]
        assert_same(got, want)
