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
    """Attend the step's rows to their paged prefix and, of the step itself, to their ancestors.

    Shapes   q [R, H, K] float32|bfloat16|float16, head dim contiguous, heads K apart, rows
             anywhere; k_pages, v_pages [P, G, S, K] any of the three dtypes or float8_e4m3fn, on
             the CPU also int8 [P, G, S, K + 4] (see ``append_kv``), head dim contiguous, S a power
             of two in 1..128, K a multiple of 8 in 8..256, H a multiple
             of G; page_table [B, max_pages], kv_len [B] tokens before the step, cu_rows [B + 1]
             first row of each request, int32; mask [R, W] uint32|int32, bit j of row i: the row
             descends from row j of its request (see ``build_step``), None: rows are a causal chain
             of any length; is_tree [B] uint8|bool, False: the mask is not read and the request's
             rows are a chain, None: every request is a tree if there is a mask; sinks [H] float32,
             a logit per head that only enlarges the denominator; k_scale, v_scale float32 [1] or
             [G], for float8_e4m3fn pages: the value is the stored number times the scale.
    Writes   out [R, H, K], dtype of q. The K/V of the step is in the pages already (``append_kv``).
    Returns  out.
    Units    scale multiplies q.k; then, with softcap > 0, score = softcap * tanh(score / softcap).
             sliding_window counts positions (kv_len + depth in the tree): a key at position p is
             seen from t if t - p < sliding_window or p < sink_tokens; 0: no window. Nothing is
             read of pages in front of all windows but the first sink_tokens positions. Positions
             before first_key are no keys, and no rows: nothing is read there.
    Exact    (CPU: always) a row's bits do not depend on which part of its path is still a draft,
             on other rows or requests. They do depend on ``max_depth``, the deepest that a node of
             any step may lie: keep it fixed. exact=False may be faster on a GPU.
    Bounds   max_rows: most rows of one request; max_kv_len: most kv_len + rows of one request.
             On a device they size grids and scratch; None: R, and what page_table holds.
    Device   ``backend`` None: by the tensors' device. On a device a mask of 4 words per row is
             taken as it is, a narrower one is copied wider. workspace: scratch of
             ``plan_workspace(...)["total_bytes"]`` bytes, any dtype, or a function that gives that
             many; None: kept by this module, one per stream. instance: name of a row of
             ``supported_attention()``; "fp8": the best that multiplies in e4m3 (float8_e4m3fn
             pages, compute capability 9.0), which rounds q and the weights to 3 mantissa bits;
             None: the best that multiplies in q's dtype.
             reuse_plan: the workspace was last used by a call of this step with the same lengths,
             heads and window (another layer); what that call planned serves this one too.
    status   [B] int32|uint32, flags OR-ed in: 1 a result is NaN or infinite, 2 a page id outside
             the pool, 4 the mask is no tree, 8 lengths negative or beyond the page table. Such a
             request's rows are zero (2, 4, 8); others are served. For 2, 4, 8 the CPU raises.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
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
