"""What a decoder does with each row between its matrix products, and products of few rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec_ext import _core
from specdec_ext.ops._where import name_of, stream_of, workspace_for
from specdec_ext.ops.packed_weight import PackedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_ext._core import LinearSums


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    added: Tensor | None = None,
    added_weight: Tensor | None = None,
    sums: LinearSums | None = None,
    eps: float = 1e-6,
    norm_plus_one: bool = False,
    backend: str | None = None,
) -> Tensor:
    """RMSNorm of each row, after an addition that stays in ``x``.

    Shapes   x, added, out [rows, columns], columns contiguous; weight, added_weight [columns]; all
             of one dtype, float32|bfloat16|float16.
    Writes   x += added first, if added is given. Then out = x / sqrt(mean(x^2) + eps) * w, with w =
             weight, or 1 + weight with norm_plus_one (Gemma). With added_weight, ``added`` goes
             through a norm of its own before it is added (sandwich norms). Without added, out may
             be x. sums: what ``linear_sums`` has left, in place of added, without added_weight and
             with the same bits.
    Returns  out.
    Rounding as in transformers: sums are float32, the new x is rounded before it is normalised, and
             the quotient is rounded before it is multiplied by the weight, except with
             norm_plus_one.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.rms_norm(
        x,
        weight,
        out=out,
        added=added,
        added_weight=added_weight,
        sums=sums,
        eps=eps,
        norm_plus_one=norm_plus_one,
        backend=backend,
        stream=stream_of(x),
    )
    return out


def gated_activation(
    x: Tensor, *, out: Tensor, activation: str = "silu", backend: str | None = None
) -> Tensor:
    """activation(first half of each row) times its second half.

    Shapes   x [rows, 2 * columns], out [rows, columns], columns contiguous, of one dtype,
             float32|bfloat16|float16.
    Writes   out; activation: "silu", or "gelu_tanh" (GELU with tanh). The activation is float32 and
             rounded before the product, as transformers does.
    Returns  out.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.gated_activation(x, out=out, activation=activation, backend=backend, stream=stream_of(x))
    return out


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    constant_weight: bool = False,
    cut_columns: int = 0,
    backend: str | None = None,
    workspace: Tensor | Callable[[int], Tensor] | None = None,
) -> Tensor:
    """x weight^T + bias for few rows; a row's bits do not depend on the others.

    Shapes   x [R, K], weight [N, K], out [R, N], their last axes contiguous; bias [N]; all of one
             dtype, float32|bfloat16|float16. workspace: scratch of any dtype, or a function that
             returns one of a given size; None: this module keeps one.
             A PackedWeight has 8 or 4 bits an element: x is bfloat16 or float16, its rows begin at
             multiples of 16 bytes, and each element of the weight is rounded to that dtype first.
             With format f8_a8 rows of x are rounded to e4m3, with a scale for each row.
    Writes   out. Sums are float32; the bias is added to the sum, which is rounded once.
    Returns  out.
    Speed    On a device, tensor cores compute 16-bit matrices with K a multiple of 8 whose rows
             begin at multiples of 16 bytes; a slow kernel computes all others. The choice of kernel
             affects the bits; the number of rows does not. The kernels are made for 1 to 128 rows
             and loop over more. constant_weight: promise that nothing enqueued on this stream since
             the last synchronisation writes the weight; a device may then read it before the
             previous kernel has ended.
    Parts    cut_columns: weight holds some rows of a larger matrix that has this many; the result
             has the bits of those columns of the larger product. 0: weight is the whole matrix.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    scratch: Any = workspace
    if scratch is None:
        scratch = partial(workspace_for, name_of(backend, x), x)
    _core.linear(
        x,
        **_weight_arguments(x, weight),
        out=out,
        bias=bias,
        constant_weight=constant_weight,
        cut_columns=cut_columns,
        backend=backend,
        stream=stream_of(x),
        workspace=scratch,
    )
    return out


def linear_sums(
    x: Tensor,
    weight: Tensor | PackedWeight,
    *,
    out: Tensor,
    workspace: Tensor | Callable[[int], Tensor],
    bias: Tensor | None = None,
    constant_weight: bool = False,
    backend: str | None = None,
) -> LinearSums | None:
    """``linear``, but where the sums are cut over blocks of a device they may stay in pieces.

    Then ``rms_norm`` and ``rope_append_kv`` add them up as they read them: one kernel and one round
    through memory less.

    Shapes   as in ``linear``; workspace: where the pieces are left, until its next use.
    Writes   out if it returns None; else nothing that may be read but by the result's readers.
    Returns  what was left, or None: no sum is cut, N is no multiple of 8, or the workspace does not
             hold the sums of all rows at once.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    return _core.linear(
        x,
        **_weight_arguments(x, weight),
        out=out,
        bias=bias,
        constant_weight=constant_weight,
        backend=backend,
        stream=stream_of(x),
        workspace=workspace,
        leave_sums=True,
    )


def _weight_arguments(x: Tensor, weight: Tensor | PackedWeight) -> dict[str, Any]:
    if not isinstance(weight, PackedWeight):
        return {"weight": weight}
    _check_depth(x, weight)
    return {"weight": weight.data, "format": weight.format, "columns": weight.shape[0]}


def unpack_weight(
    weight: PackedWeight, *, out: Tensor, first: int = 0, backend: str | None = None
) -> Tensor:
    """Rows of a packed weight as a matrix, for products of another library. Devices only.

    Shapes   weight [N, K], out [n, K] contiguous, at a multiple of 16 bytes: the rows from `first`,
             a multiple of 32, on.
    Writes   out: the elements that ``linear`` multiplies, rounded to its dtype, bfloat16|float16;
             in uint8 the numbers of e4m3 weights (f8_g, f8_a8) without their scales.
    Returns  out.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    if out.ndim == 2 and out.shape[1] != weight.shape[1]:
        raise ValueError(
            f"out has shape {list(out.shape)}: expected [n, K] = [any, {weight.shape[1]}]"
        )
    _core.unpack_weight(
        weight.data,
        out=out,
        format=weight.format,
        columns=weight.shape[0],
        first=first,
        backend=backend,
        stream=stream_of(out),
    )
    return out


def e4m3_rows(
    x: Tensor, *, numbers: Tensor, scales: Tensor, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Each row of x as e4m3 numbers and a scale, as ``linear`` rounds it for f8_a8. Devices only.

    Shapes   x [R, K] bfloat16|float16, K a multiple of 16, rows at multiples of 16 bytes; numbers
             uint8 [R, K] contiguous; scales float32 [R].
    Writes   scales: a row's largest magnitude over 448, at least 2^-100; NaN where the row has a
             NaN or an infinity. numbers: x over its scale, to the nearest, ties to even.
    Returns  numbers, scales.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.e4m3_rows(x, numbers=numbers, scales=scales, backend=backend, stream=stream_of(x))
    return numbers, scales


def _check_depth(x: Tensor, weight: PackedWeight) -> None:
    """Check K here: the packed bytes do not show it, since K is rounded up to whole tiles."""
    if x.ndim == 2 and x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}: expected [N, K] = [any, {x.shape[1]}]"
        )


def linear_scratch_bytes(
    rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    *,
    format: str | None = None,
    backend: str = "cuda",
) -> int:
    """Bytes of scratch that ``linear`` uses for x [rows, depth] and weight [columns, depth].

    At most 128 MiB, or the partial sums of one row if these are larger; with format f8_a8 as much
    as the rounded x besides. With less scratch a call takes several launches.

    format  of a PackedWeight; None: the weight is a tensor
    """
    name = str(dtype).removeprefix("torch.")
    return _core.linear_scratch_bytes(rows, columns, depth, name, backend, format)
