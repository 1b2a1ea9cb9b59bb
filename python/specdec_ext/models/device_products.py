"""Matrix products of a pass on a device: this package's kernel where bits matter, else torch's.

A library picks its kernel, and with it the order of every sum, by the shape of a product, so a
row's bits follow from how many rows share the step. ``ops.linear`` cuts every sum by its length
alone; in exact mode it makes all products, of prompts too. In fast mode it makes those of packed
weights with fewer rows than a prompt's chunk has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .. import ops
from .device_blocks import Matrix, Rows, StackedWeight, parts_of
from .device_unpacked import UnpackedProducts
from .place import Place

if TYPE_CHECKING:
    from .._core import LinearSums

__all__ = ["Products"]

# Scratch is kept for this many rows; products of more rows take several launches.
_SCRATCH_ROWS = 512


class Products:
    """out = x weight^T + bias.

    weights   [N, K] each: of all products that will be asked for
    dtype     of x
    max_rows  of a product
    exact     a row's bits do not depend on the other rows
    """

    def __init__(
        self,
        weights: Iterable[Rows],
        place: Place,
        *,
        dtype: torch.dtype,
        max_rows: int,
        exact: bool,
    ) -> None:
        self._exact, self._backend = exact, place.backend
        most = 0
        matrices = [part for weight in weights for part in parts_of(weight)]
        ours = [matrix for matrix in matrices if self._is_ours(matrix)]
        shapes = {(*matrix.shape, getattr(matrix, "format", None)) for matrix in ours}
        # The narrowest tiles may cut k into other units than the widest.
        for rows in {min(count, max_rows) for count in (8, 16, 32, 64, 128, _SCRATCH_ROWS)}:
            for n, k, format in shapes:
                asked = ops.linear_scratch_bytes(
                    rows, n, k, dtype, format=format, backend=place.backend
                )
                most = max(most, asked)
        # At a fixed address from the start: a captured graph holds it.
        self._scratch = torch.empty(most + 256, dtype=torch.uint8, device=place.device)
        packed = [matrix for matrix in matrices if isinstance(matrix, ops.PackedWeight)]
        self._unpacked: UnpackedProducts | None = None
        if packed and not exact:
            self._unpacked = UnpackedProducts(packed, place, dtype=dtype, max_rows=max_rows)

    def _is_ours(self, weight: Matrix) -> bool:
        return self._exact or isinstance(weight, ops.PackedWeight)

    def _of_unpacked(self, x: torch.Tensor, weight: Rows) -> UnpackedProducts | None:
        """What makes the product by torch, of the weight unpacked, where that is faster."""
        serves = (
            self._unpacked is not None
            and isinstance(weight, ops.PackedWeight)
            and self._unpacked.serves(x, weight)
        )
        return self._unpacked if serves else None

    def __call__(
        self,
        x: torch.Tensor,
        weight: Rows,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        cut_columns: int = 0,
    ) -> torch.Tensor:
        """Write x [R, K] weight^T (+ bias [N]) into out [R, N] and return it.

        cut_columns  rows of the matrix that `weight` is a part of, whose bits are wanted where bits
                     matter; 0: it is the whole
        """
        if isinstance(weight, StackedWeight):
            first = 0
            # Its parts are cut as the whole is, or a rank that has some of their rows could not be.
            cut_columns = cut_columns or weight.shape[0]
            for part in weight.parts:
                own = slice(first, first + part.shape[0])
                self(x, part, None if bias is None else bias[own], out[:, own], cut_columns)
                first = own.stop
            return out
        unpacked = self._of_unpacked(x, weight)
        if unpacked is not None and isinstance(weight, ops.PackedWeight):
            return unpacked(x, weight, bias, out)
        if self._exact or isinstance(weight, ops.PackedWeight):
            return ops.linear(
                x,
                weight,
                out=out,
                bias=bias,
                constant_weight=True,
                cut_columns=cut_columns,
                backend=self._backend,
                workspace=self._scratch,
            )
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def sums(
        self, x: torch.Tensor, weight: Rows, bias: torch.Tensor | None, out: torch.Tensor
    ) -> LinearSums | None:
        """The product for a kernel that adds up itself: what is left in pieces until the next
        product, or None if out holds the result."""
        by_torch = self._of_unpacked(x, weight) is not None
        if isinstance(weight, StackedWeight) or by_torch or not self._is_ours(weight):
            self(x, weight, bias, out)
            return None
        return ops.linear_sums(
            x,
            weight,
            out=out,
            bias=bias,
            constant_weight=True,
            backend=self._backend,
            workspace=self._scratch,
        )
