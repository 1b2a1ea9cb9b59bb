"""Speculative attention over paged K/V."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec_ext import _core
from specdec_ext.ops._where import (
    MASK_WORDS,
    constant_flags,
    name_of,
    stream_of,
    widened,
    workspace_for,
)

if TYPE_CHECKING:
    from torch import Tensor


def spec_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    cu_rows: Tensor,
    *,
    out: Tensor,
    scale: float,
    mask: Tensor | None = None,
    is_tree: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    exact: bool = True,
    max_depth: int = 127,
    max_rows: int | None = None,
    max_kv_len: int | None = None,
    instance: str | None = None,
    reuse_plan: bool = False,
    backend: str | None = None,
    workspace: Tensor | Callable[[int], Tensor] | None = None,
    status: Tensor | None = None,
    sink_tokens: int = 0,
    first_key: int = 0,
) -> Tensor:
    """Attend each row of the step to its paged prefix and to its ancestors in the step.

    Shapes   q [R, H, K] float32|bfloat16|float16, head dim contiguous, heads K apart, rows
             anywhere; k_pages, v_pages [P, G, S, K] any of the three dtypes or float8_e4m3fn, on
             the CPU also int8 [P, G, S, K + 4] (see ``append_kv``), head dim contiguous, S a power
             of two in 1..128, K a multiple of 8 in 8..256, H a multiple of G; page_table
             [B, max_pages], kv_len [B] (tokens before the step) and cu_rows [B + 1] (first row of
             each request) int32; mask [R, W] uint32|int32, bit j of row i: the row descends from
             row j of its request (see ``build_step``); None: rows are a causal chain of any length;
             is_tree [B] uint8|bool, False: the request's rows are a chain and the mask is not read;
             None: with a mask every request is a tree; sinks [H] float32, a logit per head that
             only enlarges the denominator; k_scale, v_scale float32 [1] or [G], for float8_e4m3fn
             pages: the value is the stored number times the scale.
    Writes   out [R, H, K], dtype of q. The step's K/V must be in the pages already (``append_kv``).
    Returns  out.
    Units    scale multiplies q.k; then, with softcap > 0, score = softcap * tanh(score / softcap).
             sliding_window counts positions (kv_len + depth in the tree): a row at t sees a key at
             p if t - p < sliding_window or p < sink_tokens; 0: no window. Of pages before all
             windows only the first sink_tokens positions are read. Positions before first_key hold
             no keys and are not read.
    Exact    (a CPU that does not multiply bfloat16: always) a row's bits do not depend on which
             part of its path is still a draft, nor on other rows or requests. They depend on
             ``max_depth``, the deepest place that a node of any step may have: keep it fixed.
             exact=False may be faster on a GPU, and on a CPU that multiplies bfloat16.
    Bounds   max_rows: most rows of one request; max_kv_len: most kv_len + rows of one request.
             On a device they size grids and scratch; None: R, and what page_table can hold.
    Device   ``backend`` None: chosen by the tensors' device. On a device a mask with 4 words per
             row is used as it is; a narrower one is copied to 4 words. workspace: scratch of
             ``plan_workspace(...)["total_bytes"]`` bytes, any dtype, or a function that returns
             such a tensor; None: this module keeps one per stream. instance: the name of a row of
             ``supported_attention()``; "fp8": the best kernel that multiplies in e4m3
             (float8_e4m3fn pages, compute capability 9.0), which rounds q and the weights to 3
             mantissa bits; None: the best kernel that multiplies in q's dtype. reuse_plan: the
             workspace was last used by a call of this step with the same lengths, heads and window
             (another layer), and this call uses that call's plan. Then only q and the step's own
             K/V (slots from kv_len on) may be written by what is enqueued right before the call.
    status   [B] int32|uint32, flags are OR-ed in: 1 a result is NaN or infinite, 2 a page id is
             outside the pool, 4 the mask is not a tree, 8 lengths are negative or beyond the page
             table. With 2, 4 or 8 the request's rows are zero and others are computed; the CPU
             raises instead.
    Raises   ValueError or TypeError naming the argument, its value and what is expected.
    Notes    Sums are float32 whatever the storage.
    """
    name = name_of(backend, q)
    if name != "cpu":
        mask = widened(mask, MASK_WORDS)
        if is_tree is None:
            is_tree = constant_flags(kv_len, int(mask is not None), len(kv_len))
    scratch = workspace if workspace is not None else partial(workspace_for, name, q)
    _core.spec_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        kv_len,
        cu_rows,
        mask=mask,
        is_tree=is_tree,
        out=out,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        exact=exact,
        max_depth=max_depth,
        max_rows=max_rows,
        max_kv_len=max_kv_len,
        instance=instance,
        reuse_plan=reuse_plan,
        backend=backend,
        stream=stream_of(q),
        workspace=scratch,
        status=status,
        sink_tokens=sink_tokens,
        first_key=first_key,
    )
    return out


def step_attention(
    plan: Any,
    layer: int,
    q: Tensor,
    out: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sink_tokens: int = 0,
) -> Tensor:
    """``spec_attention`` on the CPU with a step plan's geometry and pages [layers, P, G, S, K]."""
    _core.step_attention(
        plan,
        layer,
        q,
        out,
        k_pages,
        v_pages,
        scale,
        sliding_window,
        softcap,
        sinks,
        k_scale,
        v_scale,
        sink_tokens,
    )
    return out
