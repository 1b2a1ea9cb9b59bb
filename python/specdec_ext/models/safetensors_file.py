"""The tensors of a safetensors file as arrays of its mapped memory, bfloat16 too; its writer."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from .. import _core
from .host_arrays import HostArray, dtype_name

__all__ = ["FLOATS", "SafetensorsFile", "write_safetensors"]

# Names of float types in a file -> as torch names them.
FLOATS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_NUMPY: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_, "F8_E4M3": np.uint8,  # its bits
}  # fmt: skip


class SafetensorsFile:
    """names  of its tensors, in the file's order

    The library checks the header: sizes, offsets, overlaps. Raises what it raises, and ValueError
    for a type that is none of NumPy's or bfloat16.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="np") as checked:
            self.names = list(checked.keys())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(length))
            self._begin = 8 + length
            # Copy on write: nobody writes, but torch takes no arrays that are read-only.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def about(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(type as the file names it, shape)."""
        entry = self._header[name]
        return entry["dtype"], tuple(entry["shape"])

    def place(self, name: str) -> tuple[int, tuple[int, ...]]:
        """(its first byte in the file, shape)."""
        first: int = self._header[name]["data_offsets"][0]
        return self._begin + first, self.about(name)[1]

    def num_bytes(self, name: str) -> int:
        """What the tensor takes in the file."""
        first, end = self._header[name]["data_offsets"]
        return int(end - first)

    def tensor(self, name: str) -> HostArray:
        """The tensor where it lies; a copy where it lies at no multiple of its elements' size."""
        code, shape = self.about(name)
        if code not in _NUMPY:
            raise ValueError(f"its type is {code}")
        first = self._begin + self._header[name]["data_offsets"][0]
        array = np.frombuffer(self._map, _NUMPY[code], math.prod(shape), first).reshape(shape)
        array = array if array.flags.aligned else array.copy()
        return _core.Bfloat16Array(array) if code == "BF16" else array

    def drop_pages(self) -> None:
        """Give back the memory of what was read; arrays of it read it anew."""
        self._map.madvise(mmap.MADV_DONTNEED)


def write_safetensors(path: Path, tensors: Mapping[str, HostArray]) -> None:
    """A file of contiguous arrays, on the disk when this returns.

    The library's writer takes bfloat16 from torch alone. Raises OSError.
    """
    codes = {"uint8": "U8"} | {name: code for code, name in FLOATS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    bits: list[np.ndarray] = []
    end = 0
    # As the library orders them: wide elements first, so that each lies at a multiple of its size.
    order = sorted(tensors, key=lambda name: (-_bits_of(tensors[name]).itemsize, name))
    for name in order:
        array = np.ascontiguousarray(_bits_of(tensors[name]))
        header[name] = {
            "dtype": codes[dtype_name(tensors[name])],
            "shape": list(tensors[name].shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
        bits.append(array)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in bits:
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _bits_of(values: HostArray) -> np.ndarray:
    return values.bits if isinstance(values, _core.Bfloat16Array) else values
