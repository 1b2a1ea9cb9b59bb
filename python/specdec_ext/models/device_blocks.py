"""Matrices of a checkpoint on a device: packed in their own width where a kernel reads that, else
of the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch

from .. import _core, ops
from .block_config import BLOCKS

__all__ = [
    "Loaded", "Matrix", "Rows", "StackedWeight", "as_floats", "as_matrix", "as_rows", "is_kept",
    "parts_of", "some_rows",
]  # fmt: skip

# As a device holds it.
Matrix = torch.Tensor | ops.PackedWeight


@dataclass(frozen=True)
class StackedWeight:
    """Rows of packed weights, one below the other, where they differ in format: files of 4 bits
    often keep v in more bits than q and k."""

    parts: tuple[ops.PackedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Rows = Matrix | StackedWeight
# As a checkpoint gives it: floats, or blocks uint8 [N, bytes of a row] and their format.
Loaded = torch.Tensor | tuple[np.ndarray, str]


def is_kept(format: str, dtype: torch.dtype) -> bool:
    """Has a device kernels for weights of `format` in a model of `dtype`?"""
    return format in ops.PACKED_FORMATS and dtype in (torch.bfloat16, torch.float16)


def as_floats(loaded: Loaded, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`, contiguous; of blocks what they stand for."""
    if isinstance(loaded, tuple):
        blocks, format = loaded
        elements, size = BLOCKS[format]
        values = np.empty((len(blocks), blocks.shape[1] // size * elements), dtype=np.float32)
        _core.dequantize((np.ascontiguousarray(blocks), format), values)
        loaded = torch.from_numpy(values)
    return loaded.to(device, dtype).contiguous()


def as_matrix(loaded: Loaded, device: torch.device, dtype: torch.dtype) -> Matrix:
    """Packed if it is blocks of a format that is kept."""
    rows = as_rows([loaded], device, dtype)
    assert not isinstance(rows, StackedWeight)
    return rows


def as_rows(parts: Sequence[Loaded], device: torch.device, dtype: torch.dtype) -> Rows:
    """The rows of all parts, one below the other: packed if all are blocks of formats that are
    kept, each in its own."""
    blocks = [part for part in parts if isinstance(part, tuple)]
    if len(blocks) < len(parts) or not all(is_kept(format, dtype) for _, format in blocks):
        return torch.cat([as_floats(part, device, dtype) for part in parts])
    packed = []
    for format, alike in groupby(blocks, key=itemgetter(1)):
        whole = [torch.from_numpy(np.ascontiguousarray(part)).to(device) for part, _ in alike]
        packed.append(ops.pack_weight(torch.cat(whole), format))
    return packed[0] if len(packed) == 1 else StackedWeight(tuple(packed))


def some_rows(loaded: Loaded, ids: torch.Tensor) -> Loaded:
    """These rows [n] of a matrix, in this order."""
    if isinstance(loaded, tuple):
        return loaded[0][ids.numpy()], loaded[1]
    return loaded[ids.to(loaded.device)]


def parts_of(rows: Rows) -> tuple[Matrix, ...]:
    """The matrices that products read."""
    return rows.parts if isinstance(rows, StackedWeight) else (rows,)
