"""Products of many rows with packed weights, by torch: weights are unpacked first, in pieces.

This package's kernels widen a packed weight again for every 128 rows. Prompts have more, and a
library's product of a plain matrix is then worth its unpacking (docs/kernels/linear.md). How its
sums are cut depends on the number of rows, so exact mode does not come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .. import ops
from .place import Place

__all__ = ["UnpackedProducts"]

# Rows from which on the unpacking is worth it, to e4m3 numbers and to elements of 16 bits
# (tests/unit/test_gpu_model_prompts.py).
FEWEST_ROWS_E4M3, FEWEST_ROWS = 512, 768
# Bytes of a weight that are unpacked at a time, and the rows that a piece is a multiple of.
_PIECE_BYTES, _PIECE_ROWS = 128 << 20, 32


class UnpackedProducts:
    """out = x weight^T + bias, for calls that serves() is true of.

    weights   [N, K] each: of all products that will be asked for
    dtype     of x
    max_rows  of a product
    """

    def __init__(
        self,
        weights: Sequence[ops.PackedWeight],
        place: Place,
        *,
        dtype: torch.dtype,
        max_rows: int,
    ) -> None:
        self._backend, self._dtype = place.backend, dtype
        self._has_e4m3 = ops.device_limits(place.backend, place.device.index or 0).major >= 9
        weights = [weight for weight in weights if self._takes(max_rows, weight)]
        pieces = [
            self._piece_rows(weight) * weight.shape[1] * self._element_bytes(weight)
            for weight in weights
        ]
        inputs = [max_rows * weight.shape[1] for weight in weights if self._in_e4m3(weight)]

        def scratch(sizes: list[int]) -> torch.Tensor:
            return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=place.device)

        # At fixed addresses from the start, as all that a captured graph holds.
        self._piece, self._numbers = scratch(pieces), scratch(inputs)
        self._scales = torch.empty(
            max_rows if inputs else 0, dtype=torch.float32, device=place.device
        )

    def serves(self, x: torch.Tensor, weight: ops.PackedWeight) -> bool:
        return self._takes(x.shape[0], weight)

    def _takes(self, rows: int, weight: ops.PackedWeight) -> bool:
        if self._in_e4m3(weight):
            return rows >= FEWEST_ROWS_E4M3
        # Rows in e4m3 by other weights than those are this package's.
        return weight.format != "f8_a8" and rows >= FEWEST_ROWS

    def _in_e4m3(self, weight: ops.PackedWeight) -> bool:
        """torch multiplies e4m3 numbers, with a scale for each row of both, into bfloat16, whole
        sixteens of rows."""
        scaled = weight.format == "f8_a8" and weight.row_scales is not None
        fits = weight.shape[0] % 16 == 0 and self._dtype == torch.bfloat16
        return scaled and fits and self._has_e4m3

    def _element_bytes(self, weight: ops.PackedWeight) -> int:
        return 1 if self._in_e4m3(weight) else self._dtype.itemsize

    def _piece_rows(self, weight: ops.PackedWeight) -> int:
        """Rows of a weight that are unpacked at a time."""
        n, k = weight.shape
        fitting = _PIECE_BYTES // (k * self._element_bytes(weight))
        return min(n, max(_PIECE_ROWS, fitting // _PIECE_ROWS * _PIECE_ROWS))

    def __call__(
        self,
        x: torch.Tensor,
        weight: ops.PackedWeight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write x [R, K] weight^T (+ bias [N]) into out [R, N] and return it."""
        n, k = weight.shape
        step = self._piece_rows(weight)
        in_e4m3 = self._in_e4m3(weight)
        if in_e4m3:
            numbers = self._numbers[: x.numel()].view(x.shape)
            scales = self._scales[: len(x)]
            ops.e4m3_rows(x, numbers=numbers, scales=scales, backend=self._backend)
        for first in range(0, n, step):
            own = slice(first, min(n, first + step))
            count = own.stop - first
            piece = self._piece[: count * k * self._element_bytes(weight)]
            piece = (piece if in_e4m3 else piece.view(self._dtype)).view(count, k)
            ops.unpack_weight(weight, out=piece, first=first, backend=self._backend)
            part = None if bias is None else bias[own]
            if in_e4m3:
                assert weight.row_scales is not None
                self._multiply_e4m3(numbers, scales, piece, weight.row_scales[own], out[:, own])
                if part is not None:
                    out[:, own] += part
            elif part is None:
                torch.mm(x, piece.t(), out=out[:, own])
            else:
                torch.addmm(part, x, piece.t(), out=out[:, own])
        return out

    @staticmethod
    def _multiply_e4m3(
        x: torch.Tensor,
        x_scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """x [R, K] and weight [n, K]: numbers, uint8; their scales [R] and [n]."""
        multiply = partial(
            torch._scaled_mm,
            x.view(torch.float8_e4m3fn),
            weight.view(torch.float8_e4m3fn).t(),
            scale_a=x_scales[:, None],
            scale_b=weight_scales[None],
            out_dtype=out.dtype,
        )
        if out.is_contiguous():
            multiply(out=out)
        else:
            out.copy_(multiply())
