"""The geometry of a step, packed masks, and the greedy choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec_ext import _core
from specdec_ext.ops._where import name_of, stream_of, workspace_for

if TYPE_CHECKING:
    from torch import Tensor


def build_step(
    parents: Tensor,
    page_table: Tensor,
    kv_len: Tensor,
    cu_rows: Tensor,
    *,
    positions: Tensor,
    mask: Tensor,
    is_tree: Tensor,
    slots: Tensor | None = None,
    page_size: int,
    num_pages: int,
    max_depth: int = 127,
    max_rows: int | None = None,
    backend: str | None = None,
    status: Tensor | None = None,
) -> None:
    """Derive the step's geometry from each request's parents, on the device that holds them.

    Shapes   parents [R] int32, within the request: the parent's row, -1 for its first; rows past
             cu_rows[B] are padding; page_table, kv_len, cu_rows as in ``spec_attention``.
    Writes   positions [R] int32, kv_len + depth; mask [R, 4] uint32|int32, bit j of row i: i
             descends from row j or is it; is_tree [B] uint8, 0: every parent is the row before;
             slots [R] int64, page * page_size + offset of the row's K/V, -1 where there is none.
    Limits   a tree has at most 128 rows and no node deeper than max_depth; a request that breaks
             them is treated as a chain and flagged in ``status``.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.build_step(
        parents,
        page_table,
        kv_len,
        cu_rows,
        positions=positions,
        mask=mask,
        is_tree=is_tree,
        slots=slots,
        page_size=page_size,
        num_pages=num_pages,
        max_depth=max_depth,
        max_rows=max_rows,
        backend=backend,
        stream=stream_of(parents),
        status=status,
    )


def argmax(
    scores: Tensor,
    out: Tensor,
    *,
    backend: str | None = None,
    workspace: Tensor | Callable[[int], Tensor] | None = None,
) -> Tensor:
    """Index of the largest score of each row: the first on ties, -1 for a row that holds a NaN.

    Shapes   scores [rows, V] float32|bfloat16|float16, rows may be strided; workspace: scratch of
             any dtype, or a function that returns one of a given size; None: this module keeps
             one. A smaller one makes the call slower, not wrong.
    Writes   out [rows] int32.
    Returns  out.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    scratch: Any = workspace
    if scratch is None:
        scratch = partial(workspace_for, name_of(backend, scores), scores)
    _core.argmax(scores, out, backend=backend, stream=stream_of(scores), workspace=scratch)
    return out


def pack_mask(mask: Tensor, out: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Pack a boolean mask [R, n <= 128] into uint32 words [R, ceil(n / 32)], low bit first.

    Writes   out [R, W] uint32|int32 with ceil(n / 32) <= W <= 4, bits from n on are 0; None: made
             here.
    Returns  out.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    if out is None:
        rows, columns = mask.shape if mask.ndim == 2 else (0, 0)
        words = max(1, -(-columns // 32))
        import torch

        out = torch.empty(rows, words, dtype=torch.int32, device=mask.device).view(torch.uint32)
    _core.pack_mask(mask, out, backend=backend, stream=stream_of(mask))
    return out


def mask_from_parents(parents: Sequence[int]) -> Tensor:
    """Packed ancestor bits [n, ceil(n / 32)] uint32 of a draft tree of n <= 128 nodes.

    ``parents[0]`` is -1 (the golden token) and ``0 <= parents[i] < i``; each node sees its
    ancestors and itself. The mask is made on the CPU; ``build_step`` makes it on any backend.

    Raises   ValueError naming the first offending entry.
    """
    import torch

    return torch.from_numpy(_core.mask_from_parents(list(parents)))


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of the CPU backend, 1..256; kernels that run end first.

    The default is SPECDEC_NUM_THREADS, else the number of CPUs that the process may use.
    """
    _core.set_num_threads(num_threads)


def num_threads() -> int:
    """Threads of the CPU backend."""
    return int(_core.num_threads())
