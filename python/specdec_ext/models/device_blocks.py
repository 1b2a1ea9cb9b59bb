"""Matrices of a checkpoint on a device: packed in their own width where a kernel reads that, else
of the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .. import _core, ops
from .block_config import BLOCKS

__all__ = ["Loaded", "Matrix", "as_floats", "as_matrix", "is_kept", "some_rows"]

# As a device holds it.
Matrix = torch.Tensor | ops.PackedWeight
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


def as_matrix(parts: Sequence[Loaded], device: torch.device, dtype: torch.dtype) -> Matrix:
    """The rows of all parts as one matrix: packed if all are blocks of one format that is kept."""
    blocks = [part for part in parts if isinstance(part, tuple)]
    formats = {format for _, format in blocks}
    if len(blocks) < len(parts) or len(formats) > 1 or not is_kept(blocks[0][1], dtype):
        return torch.cat([as_floats(part, device, dtype) for part in parts])
    whole = [torch.from_numpy(np.ascontiguousarray(part)).to(device) for part, _ in blocks]
    return ops.pack_weight(torch.cat(whole), blocks[0][1])


def some_rows(loaded: Loaded, ids: torch.Tensor) -> Loaded:
    """These rows [n] of a matrix, in this order."""
    if isinstance(loaded, tuple):
        return loaded[0][ids.numpy()], loaded[1]
    return loaded[ids.to(loaded.device)]
