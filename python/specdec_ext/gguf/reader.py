"""A GGUF file, mapped: its metadata and where its tensors lie.

Every count, length, type and offset is checked against the file before it is used, so that a
damaged or hostile file is one ModelError that names file and field. Nothing is allocated by a
number that a file states. Strings and arrays of the metadata are decoded when they are asked for:
a vocabulary of 49,152 tokens costs its decoding only where there is a tokenizer to make.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .._core import text_array, text_array_end
from ..config.validate import show
from ..errors import ModelError, UnsupportedModelError

__all__ = ["FORMATS", "GgufFile", "GgufTensor", "is_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16  # of metadata, and of tensors
_MAX_STRINGS = 1 << 22  # of all arrays together
_MAX_NAME = 1 << 10
_MAX_EXTENT = 1 << 32
_MAX_ALIGNMENT = 1 << 20

_UINT32, _STRING, _ARRAY = 4, 8, 9
# Metadata types by number: struct's letters.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
# Tensor types by number: name, elements and bytes of a block.
FORMATS = {
    0: ("float32", 1, 4), 1: ("float16", 1, 2), 30: ("bfloat16", 1, 2),
    2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210),
}  # fmt: skip
_OTHER_FORMATS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip


def is_gguf(path: Path) -> bool:
    """A file, not a folder, that is named as one or begins as one."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


@dataclass(frozen=True)
class GgufTensor:
    """format: float32, float16, bfloat16 or a block format's name; shape: slowest axis first."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def is_quantised(self) -> bool:
        """Its rows are blocks."""
        return self.format.startswith("q")


class GgufFile:
    """The file at `path`; close it, or use it in a `with`.

    tensors  name -> GgufTensor

    Raises ModelError for a file that cannot be read or holds what it may not, UnsupportedModelError
    for a sound one of a version or tensor type that this package does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, GgufTensor] = {}
        self._entries: dict[str, tuple[int, int]] = {}  # key -> type, position
        self._strings = 0
        try:
            with path.open("rb") as file:
                # Pages that are written to would be copies, and none is. Arrays over a read-only
                # map are refused by DLPack and warned of by torch.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error})") from error
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Arrays of data() that are still in use keep it mapped."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        """The keys of the metadata, in the file's order."""
        return iter(self._entries)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata entry `key`: a number, a bool, a text or a list of them."""
        if key not in self._entries:
            return default
        kind, at = self._entries[key]
        return self._value(key, kind, at)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> Any:
        """The number `key`; ModelError if it is missing without a default, or out of its range."""
        value = self.get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value <= high
        ):
            raise self._fault(f"{key} = {show(value)}: expected a number {low:g}..{high:g}")
        return value

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """As number(), without a fraction."""
        value = self.number(key, low, high, default)
        if value != int(value):
            raise self._fault(f"{key} = {show(value)}: expected a whole number {low}..{high}")
        return int(value)

    def token_id(self, key: str) -> int | None:
        """The token id `key`; None if it is missing, ModelError if it is something else."""
        value = self.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self._fault(f"{key} = {show(value)}: expected a token id, a whole number >= 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The bool `key`; ModelError if it is something else."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._fault(f"{key} = {show(value)}: expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """The text `key`; ModelError if it is missing without a default, or something else."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._fault(f"{key} = {show(value)}: expected a text")
        return value

    def array(self, key: str, kind: type | tuple[type, ...], what: str) -> list[Any]:
        """The array `key` of elements of these types, `what` in words; ModelError if it is missing
        or something else."""
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self._fault(f"{key} = {show(value)}: expected an array of {what}")
        return value

    def data(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor where it lies: floats in its shape (bfloat16 as uint16), blocks as uint8
        [..., bytes of a row]. Valid while the file is open."""
        raw = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        if tensor.is_quantised:
            return raw.reshape(*tensor.shape[:-1], -1)
        dtype = {"float32": np.float32, "float16": np.float16}.get(tensor.format, np.uint16)
        return raw.view(dtype).reshape(tensor.shape)

    def drop_pages(self) -> None:
        """Give back the memory of what was read; arrays of it read it anew."""
        self._map.madvise(mmap.MADV_DONTNEED)

    # -- Reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._map[:4] != _MAGIC:
            raise self._fault(
                f"it begins with {self._map[:4]!r}, not with {_MAGIC!r}: no GGUF file"
            )
        version = self._scalar("version", "I", 4)
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version}: supported are {_VERSIONS[0]} and "
                f"{_VERSIONS[1]}, in little-endian byte order; convert the model again"
            )
        counts = {
            name: self._scalar(name, "Q", at)
            for name, at in (("tensor_count", 8), ("kv_count", 16))
        }
        for name, count in counts.items():
            if count > _MAX_ENTRIES:
                raise self._fault(f"{name} = {count}: at most {_MAX_ENTRIES}")
        at = 24
        for index in range(counts["kv_count"]):
            at = self._read_entry(f"metadata entry {index}", at)
        self._read_tensors(counts["tensor_count"], at)

    def _read_entry(self, where: str, at: int) -> int:
        key, at = self._name(where, at)
        if key in self._entries:
            raise self._fault(f"{key}: given twice")
        kind = self._scalar(key, "I", at)
        self._entries[key] = kind, at + 4
        return self._skip(key, kind, at + 4)

    def _read_tensors(self, count: int, at: int) -> None:
        found: list[tuple[str, str, int, int, tuple[int, ...]]] = []
        for index in range(count):
            name, at = self._name(f"tensor {index}", at)
            dims = self._scalar(name, "I", at)
            if not 1 <= dims <= 4:
                raise self._fault(f"tensor {name!r}: {dims} dimensions, expected 1..4")
            extents = tuple(self._scalar(name, "Q", at + 4 + 8 * i) for i in range(dims))
            at += 4 + 8 * dims
            kind, offset = self._scalar(name, "I", at), self._scalar(name, "Q", at + 4)
            at += 12
            if kind not in FORMATS:
                known = ", ".join(format.upper() for format, _, _ in FORMATS.values())
                found_type = _OTHER_FORMATS.get(kind, f"of type {kind}")
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r} is {found_type}: supported are "
                    f"{known}; quantise the model to one of these"
                )
            format, elements, size = FORMATS[kind]
            if any(not 1 <= extent <= _MAX_EXTENT for extent in extents) or extents[0] % elements:
                raise self._fault(
                    f"tensor {name!r}: extents {list(extents)}, expected 1..{_MAX_EXTENT}, the "
                    f"first in whole blocks of {elements}"
                )
            nbytes = extents[0] // elements * size
            for extent in extents[1:]:
                nbytes *= extent
            found.append((name, format, offset, nbytes, extents[::-1]))
        start = self._data_start(at)
        end = 0
        for name, format, offset, nbytes, shape in sorted(found, key=lambda entry: entry[2]):
            if offset % self._alignment or start + offset + nbytes > len(self._map):
                raise self._fault(
                    f"tensor {name!r}: {nbytes} bytes at {offset}: the file has "
                    f"{max(0, len(self._map) - start)} bytes of tensors, aligned to "
                    f"{self._alignment}; it is truncated or damaged"
                )
            if offset < end:
                raise self._fault(f"tensor {name!r}: overlaps the tensor before it")
            if name in self.tensors:
                raise self._fault(f"tensor {name!r}: given twice")
            end = offset + nbytes
            self.tensors[name] = GgufTensor(name, format, shape, start + offset, nbytes)

    def _data_start(self, at: int) -> int:
        key = "general.alignment"
        if key in self._entries and self._entries[key][0] != _UINT32:
            raise self._fault(f"{key} is not a uint32")
        self._alignment = int(self.get(key, 32))
        if not 8 <= self._alignment <= _MAX_ALIGNMENT or self._alignment & (self._alignment - 1):
            raise self._fault(
                f"{key} = {self._alignment}: expected a power of two 8..{_MAX_ALIGNMENT}"
            )
        return (at + self._alignment - 1) // self._alignment * self._alignment

    # -- Values -----------------------------------------------------------------------------------

    def _fault(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}; the file is damaged, copy it again")

    def _scalar(self, name: str, letter: str, at: int) -> Any:
        try:
            return struct.unpack_from("<" + letter, self._map, at)[0]
        except struct.error:
            raise self._fault(f"{name}: the file ends within it") from None

    def _span(self, name: str, at: int) -> tuple[int, int]:
        """Begin and end of a string's bytes."""
        length = self._scalar(name, "Q", at)
        if length > len(self._map) - at - 8:
            raise self._fault(
                f"{name}: a text of {length} bytes, {len(self._map) - at - 8} are left"
            )
        return at + 8, at + 8 + length

    def _name(self, where: str, at: int) -> tuple[str, int]:
        begin, end = self._span(where, at)
        if not 1 <= end - begin <= _MAX_NAME:
            raise self._fault(f"{where}: a name of {end - begin} bytes, allowed 1..{_MAX_NAME}")
        return self._decode(where, begin, end), end

    def _decode(self, name: str, begin: int, end: int) -> str:
        try:
            return self._map[begin:end].decode("utf-8")
        except UnicodeDecodeError:
            raise self._fault(f"{name}: a text that is not UTF-8") from None

    def _array(self, key: str, at: int) -> tuple[int, int]:
        """Type and count of an array's elements; they begin at `at` + 12."""
        kind, count = self._scalar(key, "I", at), self._scalar(key, "Q", at + 4)
        left = len(self._map) - at - 12
        size = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS.get(kind, "x"))
        if kind != _STRING and kind not in _SCALARS:
            raise self._fault(f"{key}: an array of elements of type {kind}")
        if count * size > left:
            raise self._fault(f"{key}: an array of {count} elements, {left} bytes are left")
        return kind, count

    def _skip(self, key: str, kind: int, at: int) -> int:
        """Where the value at `at` ends."""
        if kind in _SCALARS:
            self._scalar(key, _SCALARS[kind], at)
            return at + struct.calcsize("<" + _SCALARS[kind])
        if kind == _STRING:
            return self._span(key, at)[1]
        if kind != _ARRAY:
            raise self._fault(f"{key}: type {kind} of a value is unknown")
        element, count = self._array(key, at)
        at += 12
        if element in _SCALARS:
            return at + count * struct.calcsize("<" + _SCALARS[element])
        self._strings += count
        if self._strings > _MAX_STRINGS:
            raise self._fault(
                f"{key}: with it {self._strings} texts in arrays, at most {_MAX_STRINGS}"
            )
        try:
            return text_array_end(self._map, at, count)
        except ValueError as error:
            raise self._fault(f"{key}: {error}") from None

    def _value(self, key: str, kind: int, at: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(key, _SCALARS[kind], at)
        if kind == _STRING:
            return self._decode(key, *self._span(key, at))
        element, count = self._array(key, at)
        at += 12
        if element in _SCALARS:
            return list(struct.unpack_from(f"<{count}{_SCALARS[element]}", self._map, at))
        try:
            return text_array(self._map, at, count)
        except UnicodeDecodeError:
            raise self._fault(f"{key}: a text that is not UTF-8") from None
