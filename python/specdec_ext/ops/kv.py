"""Write K/V into the pages, and move accepted K/V to its final place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec_ext import _core
from specdec_ext.ops._where import MAX_STEP_TOKENS, name_of, stream_of, widened

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_ext._core import LinearSums


def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    cu_rows: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_rows: int | None = None,
    max_kv_len: int | None = None,
    backend: str | None = None,
    status: Tensor | None = None,
) -> None:
    """Write the K/V of the step's rows into the pages, row i of request b at token kv_len[b] + i.

    Shapes   k, v [R, G, K] float32|bfloat16|float16, heads K apart; k_scale, v_scale float32 [1]
             or [G], for float8_e4m3fn pages only: what is stored is k / k_scale; the rest as
             ``spec_attention``.
    Writes   k_pages, v_pages; a change of dtype rounds to nearest even, e4m3 saturates at 448.
    int8     on the CPU pages may be int8 [P, G, S, K + 4]. A token's vector of one head is stored
             as K numbers round(x * 127 / max |x|) and the four bytes of the float32 factor
             max |x| / 127. It is stored as zeros if max |x| <= 1e-30, and as NaN if it holds a NaN
             or an infinity.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.append_kv(
        k,
        v,
        k_pages,
        v_pages,
        page_table,
        kv_len,
        cu_rows,
        k_scale=k_scale,
        v_scale=v_scale,
        max_rows=max_rows,
        max_kv_len=max_kv_len,
        backend=backend,
        stream=stream_of(k_pages),
        status=status,
    )


def rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    cu_rows: Tensor,
    positions: Tensor,
    *,
    q_out: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_plus_one: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_rows: int | None = None,
    max_kv_len: int | None = None,
    sums: LinearSums | None = None,
    backend: str | None = None,
    status: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate q and k, write q to ``q_out`` and k, v into the pages, in one pass.

    Shapes   q [R, H, K], k, v [R, G, K] of one dtype, float32|bfloat16|float16, heads K apart
             (columns of one fused projection are fine); positions [R] int32, absolute; cos, sin
             [max_positions, rotary_dim / 2] float32, attention scaling folded in, None: no
             rotation; q_norm, k_norm [K], the weights of an RMSNorm over each head, None: no norm;
             the rest as ``append_kv``.
    Rotation (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + rotary_dim / 2), or
             (2i, 2i + 1) if ``interleaved``; elements from rotary_dim on stay as they are.
    Norm     before the rotation: x / sqrt(mean(x^2) + norm_eps) * w; w + 1 with norm_plus_one.
    Sums     of a projection [R, (H + 2G) K], what ``linear_sums`` has left: its columns are read in
             place of q, k and v, and have the bits that those would have.
    Writes   q_out [R, H, K], which may be q itself; k_pages, v_pages. It computes in float32 and
             rounds once.
    Returns  q_out.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.rope_append_kv(
        q,
        k,
        v,
        k_pages,
        v_pages,
        page_table,
        kv_len,
        cu_rows,
        positions,
        q_out=q_out,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=norm_eps,
        norm_plus_one=norm_plus_one,
        k_scale=k_scale,
        v_scale=v_scale,
        max_rows=max_rows,
        max_kv_len=max_kv_len,
        sums=sums,
        backend=backend,
        stream=stream_of(k_pages),
        status=status,
    )
    return q_out


def compact_kv(
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    cu_rows: Tensor,
    path: Tensor,
    path_len: Tensor,
    *,
    num_rows: int | None = None,
    max_kv_len: int | None = None,
    backend: str | None = None,
    status: Tensor | None = None,
) -> None:
    """Move the K/V of accepted drafts to their final places, in all layers, without changing a bit.

    Shapes   k_pages, v_pages [layers, P, G, S, K]; page_table, kv_len, cu_rows as in
             ``spec_attention`` (kv_len: before the step); path [B, max_path] int32, rows of the
             request from the golden token's child down, increasing (on a device a path of 128
             columns is used as it is; a narrower one is copied); path_len [B] int32, number of
             accepted drafts.
    Writes   token kv_len[b] + 1 + i from token kv_len[b] + path[b, i], for i < path_len[b].
    Bounds   num_rows: rows of the step; max_kv_len: as in ``spec_attention``.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    if name_of(backend, k_pages) != "cpu":
        path = widened(path, MAX_STEP_TOKENS)
    _core.compact_kv(
        k_pages,
        v_pages,
        page_table,
        kv_len,
        cu_rows,
        path,
        path_len,
        num_rows=num_rows,
        max_kv_len=max_kv_len,
        backend=backend,
        stream=stream_of(k_pages),
        status=status,
    )


def step_append_kv(
    plan: Any,
    layer: int,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """``append_kv`` on the CPU with the geometry of a step plan and pages [layers, P, G, S, K]."""
    _core.step_append_kv(plan, layer, k, v, k_pages, v_pages, k_scale, v_scale)
