"""What a decoder does with each row between its matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_ext import _core
from specdec_ext.ops._where import stream_of

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    added: Tensor | None = None,
    added_weight: Tensor | None = None,
    eps: float = 1e-6,
    norm_plus_one: bool = False,
    backend: str | None = None,
) -> Tensor:
    """RMSNorm of each row, after an addition that stays in ``x``.

    Shapes   x, added, out [rows, columns], columns contiguous; weight, added_weight [columns]; all
             of one dtype, float32|bfloat16|float16.
    Writes   with added: x += added, first. out = x / sqrt(mean(x^2) + eps) * w, with w = weight, or
             1 + weight with norm_plus_one (Gemma). added_weight: what is added goes through such a
             norm of its own before (sandwich norms). Without added, out may be x.
    Returns  out.
    Rounding as transformers does: sums are float32, the new x is rounded before it is normalised;
             the quotient is rounded before it meets the weight, except with norm_plus_one.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.rms_norm(
        x,
        weight,
        out=out,
        added=added,
        added_weight=added_weight,
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
