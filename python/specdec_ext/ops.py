"""The CPU kernels of speculative decoding, on torch tensors.

Inference only: a tensor that requires gradients is refused. Outputs are given by the caller and
filled; nothing is copied or allocated on the way. The GIL is released while a kernel runs.

Axes   B requests, R rows (step tokens) of all requests, H query heads, G KV heads, K head dim,
       P pages, S page size in tokens, V vocabulary, W mask words.
Slots  The K/V of a request's token t lies in page ``page_table[b, t // S]`` at ``t % S``; the
       i-th row of the step lies at token ``kv_len[b] + i``. Page ids past that are never read.

Every row's bits depend only on its query, the K/V of the tokens that it sees in position order,
and the scalar parameters: not on the other rows or requests, the page and slot numbers, how a
prompt was cut into chunks, or the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec_ext import _core

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "append_kv",
    "argmax",
    "compact_kv",
    "mask_from_parents",
    "num_threads",
    "pack_mask",
    "set_num_threads",
    "spec_attention",
    "step_append_kv",
    "step_attention",
]


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
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend the step's rows to their paged prefix and, of the step itself, to their ancestors.

    Shapes   q [R, H, K] float32|bfloat16|float16, head dim contiguous, heads K apart, rows
             anywhere; k_pages, v_pages [P, G, S, K] any of the three dtypes, head dim
             contiguous, S a power of two in 1..128, K a multiple of 8 in 8..256, H a multiple of
             G; page_table [B, max_pages], kv_len [B] tokens before the step, cu_rows [B + 1]
             first row of each request, int32; mask [R, W] uint32|int32, bit j of row i: the row
             descends from row j of its request (see ``mask_from_parents``), None: rows are a
             causal chain of any length; sinks [H] float32, a logit per head that only enlarges
             the denominator.
    Writes   out [R, H, K], dtype of q. The K/V of the step is in the pages already (``append_kv``).
    Returns  out.
    Units    scale multiplies q.k; then, with softcap > 0, score = softcap * tanh(score / softcap).
             sliding_window counts positions (kv_len + depth in the tree): a key at position p is
             seen from t if t - p < sliding_window; 0: no window.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    Notes    Sums are float32 whatever the storage; probabilities are not rounded to it.
    """
    _core.spec_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        kv_len,
        cu_rows,
        mask=mask,
        out=out,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )
    return out


def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    cu_rows: Tensor,
) -> None:
    """Write the K/V of the step's rows into the pages, row i of request b at token kv_len[b] + i.

    Shapes   k, v [R, G, K] float32|bfloat16|float16, heads K apart; the rest as ``spec_attention``.
    Writes   k_pages, v_pages; a change of dtype rounds to nearest even.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.append_kv(k, v, k_pages, v_pages, page_table, kv_len, cu_rows)


def compact_kv(
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    cu_rows: Tensor,
    path: Tensor,
    path_len: Tensor,
) -> None:
    """Move the K/V of accepted drafts to their final tokens, for all layers, bit by bit.

    Shapes   k_pages, v_pages [layers, P, G, S, K]; page_table, kv_len, cu_rows as in
             ``spec_attention`` (kv_len: before the step); path [B, max_path] int32, rows of the
             request from the golden token's child down, increasing; path_len [B] int32, accepted
             drafts.
    Writes   token kv_len[b] + 1 + i from token kv_len[b] + path[b, i], for i < path_len[b].
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.compact_kv(k_pages, v_pages, page_table, kv_len, cu_rows, path, path_len)


def argmax(scores: Tensor, out: Tensor) -> Tensor:
    """Index of the largest score of each row: the first on ties, -1 for a row that holds a NaN.

    Shapes   scores [rows, V] float32, rows may be strided.
    Writes   out [rows] int32.
    Returns  out.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.argmax(scores, out)
    return out


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean mask [R, n <= 128] into uint32 words [R, ceil(n / 32)], low bit first.

    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    return torch.from_numpy(_core.pack_mask(mask))


def mask_from_parents(parents: Sequence[int]) -> Tensor:
    """Packed ancestor bits [n, ceil(n / 32)] uint32 of a draft tree of n <= 128 nodes.

    ``parents[0]`` is -1 (the golden token) and ``0 <= parents[i] < i``; each node sees its
    ancestors and itself.

    Raises   ValueError naming the first offending entry.
    """
    return torch.from_numpy(_core.mask_from_parents(list(parents)))


def step_append_kv(
    plan: Any, layer: int, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor
) -> None:
    """``append_kv`` with the geometry of a step plan and pages [layers, P, G, S, K]."""
    _core.step_append_kv(plan, layer, k, v, k_pages, v_pages)


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
) -> Tensor:
    """``spec_attention`` with the geometry of a step plan and pages [layers, P, G, S, K]."""
    _core.step_attention(
        plan, layer, q, out, k_pages, v_pages, scale, sliding_window, softcap, sinks
    )
    return out


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of the CPU backend, 1..256. Not while a kernel runs.

    The default is SPECDEC_NUM_THREADS, else the CPUs that the process may use.
    """
    _core.set_num_threads(num_threads)


def num_threads() -> int:
    """Threads of the CPU backend."""
    return int(_core.num_threads())
