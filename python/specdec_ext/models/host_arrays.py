"""Arrays on the host without torch: NumPy's, and bfloat16, which NumPy does not have, as the core's
Bfloat16Array around the bits. Every call of the core takes both; torch's tensors begin where a
caller has them or wants them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .. import _core

if TYPE_CHECKING:
    import torch

__all__ = [
    "HostArray",
    "as_torch",
    "converted",
    "dtype_name",
    "from_torch",
    "kv_dtype_name",
    "like",
    "num_bytes",
    "row_slice",
    "stacked",
    "take_rows",
]

HostArray = np.ndarray | _core.Bfloat16Array


def dtype_name(values: HostArray) -> str:
    """As torch names it."""
    return "bfloat16" if isinstance(values, _core.Bfloat16Array) else str(values.dtype)


def kv_dtype_name(model: Any) -> str | None:
    """The name of a model's kv_dtype; None for what has none. The native decoder knows it without
    torch."""
    known = getattr(model, "kv_dtype_name", None) or getattr(model, "kv_dtype", None)
    return None if known is None else str(known).removeprefix("torch.")


def converted(values: HostArray, dtype: str) -> HostArray:
    """The values in a float type, rounded to the nearest, ties to even; themselves if they are."""
    if dtype_name(values) == dtype:
        return values
    if isinstance(values, np.ndarray):
        wide = values.dtype not in (np.float32, np.float16)
        values = np.ascontiguousarray(values, dtype=np.float32 if wide else None)
    bits = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    out = np.empty(values.shape, dtype=bits)
    result = _core.Bfloat16Array(out) if dtype == "bfloat16" else out
    if math.prod(values.shape) and not (dtype == "float32" == dtype_name(values)):
        _core.convert_floats(values, result)
    elif math.prod(values.shape):
        out[...] = values
    return result


def stacked(values: Sequence[HostArray], dtype: str) -> HostArray:
    """Arrays of one shape but for the first axis, one after another along it, in a float type."""
    parts = [converted(value, dtype) for value in values]
    if len(parts) == 1:
        return parts[0]
    if dtype == "bfloat16":
        return _core.Bfloat16Array(np.concatenate([cast(Any, part).bits for part in parts]))
    return np.concatenate(cast(list[np.ndarray], parts))


def take_rows(values: HostArray, rows: Sequence[int] | np.ndarray) -> HostArray:
    """A copy of some rows, in their order."""
    if isinstance(values, _core.Bfloat16Array):
        return _core.Bfloat16Array(np.ascontiguousarray(values.bits[rows]))
    return np.ascontiguousarray(values[rows])


def num_bytes(values: HostArray) -> int:
    """Bytes of the elements."""
    return int((values.bits if isinstance(values, _core.Bfloat16Array) else values).nbytes)


def row_slice(values: HostArray, rows: slice | None) -> HostArray:
    """Some rows where they lie; None: all."""
    if rows is None:
        return values
    if isinstance(values, _core.Bfloat16Array):
        return _core.Bfloat16Array(values.bits[rows])
    return values[rows]


def as_torch(values: Any) -> torch.Tensor:
    """A tensor of the same memory; a tensor itself."""
    import torch

    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values)
    from torch.utils.dlpack import from_dlpack

    result: torch.Tensor = from_dlpack(values)
    return result


def from_torch(tensor: torch.Tensor) -> HostArray:
    """The memory of a tensor on the host; a copy of one that is not contiguous."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return _core.Bfloat16Array(tensor.view(torch.int16).numpy().view(np.uint16))
    array: np.ndarray = tensor.numpy()
    return array


def like(given: Any, result: np.ndarray) -> Any:
    """A result as its caller gave the argument: a tensor for a tensor."""
    return result if isinstance(given, (np.ndarray, list)) else as_torch(result)
