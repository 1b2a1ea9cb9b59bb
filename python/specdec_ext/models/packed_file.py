"""Weights as the native decoder packs them, in one file that is mapped instead of packed anew.

The bytes of the file are those of the packs in memory (docs/packed_weights.md): a load reads the
header and maps the rest, so that processes share one copy and pages are read when a pass gets to
them. The header says what the file was packed from and for; whatever does not fit is refused, and
every piece is held against its sha256 once, until the file's size or one of its times changes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shlex
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .. import _core
from ..config.validate import show
from ..errors import ModelError
from .folder_cache import check_once

__all__ = ["PackedFile", "packed_name", "write_packed"]

_MAGIC, _VERSION = b"SDPACKED", 1
# Magic, version of the file, layout of the packs, bytes of the header and its sha256.
_HEAD = struct.Struct("<8sIIQ32s8x")
_MAX_HEADER = 64 << 20
_ALIGNMENT, _PAGE = 64, 4096
_CHUNK = 16 << 20  # bytes of one write, a multiple of a huge page
_FIELDS = {"made_by": str, "isa": str, "weights": dict, "config": dict, "ropes": dict,
           "rebuild": list, "warnings": list, "pieces": list, "bytes": int}  # fmt: skip
# One piece of the file: name, type, n, k, first byte, sha256.
_Piece = tuple[str, str, int, int, int, str]
Tables = Mapping[int, tuple[np.ndarray, np.ndarray]]


def packed_name(rank: int = 0, ranks: int = 1) -> str:
    """The packed file of a model folder, or of one rank of it."""
    return "packed.bin" if ranks == 1 else f"packed-{rank}-of-{ranks}.bin"


def write_packed(
    path: Path,
    decoder: Any,
    ropes: Tables,
    *,
    weights: Mapping[str, Any],
    config: Mapping[str, Any],
    rebuild: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> None:
    """Write the packed weights of a _core.LlamaDecoder, on the disk when this returns.

    ropes    rotary tables (cos, sin), float32 [positions, rotary_dim / 2]
    weights  what they are, and of what files: JSON-ready
    config   of the decoder, as far as the weights depend on it
    rebuild  the command that writes the file again; (): it is made again by itself

    Raises OSError.
    """
    parts = _core.decoder_packs(decoder)
    for index, tables in ropes.items():
        for name, table in zip(("cos", "sin"), tables, strict=True):
            data = np.ascontiguousarray(table, dtype="<f4")
            view = data.reshape(-1).view(np.uint8).data
            parts.append((f"rope.{index}.{name}", "float32", data.size, 0, view))
    pieces: list[list[Any]] = []
    end = 0
    for name, kind, n, k, data in parts:
        pieces.append([name, kind, n, k, end, hashlib.sha256(data).hexdigest()])
        end += -(-len(data) // _ALIGNMENT) * _ALIGNMENT
    header = {
        "made_by": f"specdec_ext {_core.__version__}",
        "isa": _core.cpu_isa(),
        "weights": dict(weights),
        "config": dict(config),
        "ropes": {str(index): list(tables[0].shape) for index, tables in ropes.items()},
        "rebuild": list(rebuild),
        "warnings": list(warnings),
        "pieces": pieces,  # first bytes count from the first page after the header
        "bytes": end,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    begin = _first_byte(len(text))
    head = _HEAD.pack(_MAGIC, _VERSION, _core.PACK_LAYOUT, len(text), hashlib.sha256(text).digest())
    places = [(0, head), (len(head), text)]
    places += [(begin + piece[4], part[4]) for piece, part in zip(pieces, parts, strict=True)]
    with path.open("wb", buffering=0) as file:
        _write_chunks(file, places, begin + end)
        os.fsync(file.fileno())


def _write_chunks(file: RawIOBase, places: Sequence[tuple[int, Any]], size: int) -> None:
    """A file of `size` bytes with each data at its place, ascending, and zeros between them.

    It is written in large aligned chunks: Linux keeps such a file in huge pages and maps them as
    such, where a file system can; a pass that reads all weights takes 5 % less then.
    """
    buffer, first = bytearray(_CHUNK), 0

    def write() -> None:
        whole = memoryview(buffer)[: size - first]
        while whole:
            whole = whole[file.write(whole) or 0 :]

    for place, data in places:
        left = memoryview(data)
        while left:
            while place >= first + _CHUNK:
                write()
                buffer, first = bytearray(_CHUNK), first + _CHUNK
            part = left[: first + _CHUNK - place]
            buffer[place - first : place - first + len(part)] = part
            place, left = place + len(part), left[len(part) :]
    while first < size:
        write()
        buffer, first = bytearray(_CHUNK), first + _CHUNK


def _first_byte(header_bytes: int) -> int:
    return -(-(_HEAD.size + header_bytes) // _PAGE) * _PAGE


@dataclass(frozen=True)
class PackedFile:
    """What the header of a packed file says, checked against the file.

    weights, config, warnings  as write_packed() was given them
    num_bytes                  of all pieces
    remedy                     what to do about a file that cannot be used
    """

    path: Path
    weights: dict[str, Any]
    config: dict[str, Any]
    warnings: tuple[str, ...]
    num_bytes: int
    remedy: str
    _ropes: dict[int, tuple[int, int]]
    _pieces: tuple[_Piece, ...]

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Raises ModelError naming the file and the field for one that is incomplete, damaged or of
        another version or layout, with the command that makes it again."""
        try:
            with path.open("rb") as file:
                return cls._read(path, file)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error

    @classmethod
    def _read(cls, path: Path, file: BinaryIO) -> PackedFile:
        again = "delete it, or build the engine that it is part of again (specdec build)"
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise ModelError(f"{path}: not a file of packed weights ({size} bytes); {again}")
        _, version, layout, length, digest = _HEAD.unpack(head)
        if length > min(_MAX_HEADER, size - _HEAD.size):
            raise ModelError(
                f"{path}: header of {length} bytes in a file of {size}, limit {_MAX_HEADER}: it is "
                f"cut off or damaged; {again}"
            )
        text = file.read(length)
        is_intact = hashlib.sha256(text).digest() == digest
        try:
            header = json.loads(text) if is_intact else None
        except (ValueError, RecursionError):
            header = None
        if isinstance(header, dict) and _is_words(header.get("rebuild")) and header["rebuild"]:
            again = f"build it again: {shlex.join(header['rebuild'])}"
        for what, found, here in (
            ("version", version, _VERSION),
            ("layout of packs", layout, _core.PACK_LAYOUT),
        ):
            if found != here:
                raise ModelError(f"{path}: {what} {found}, this specdec_ext reads {here}; {again}")
        if not isinstance(header, dict):
            raise ModelError(f"{path}: header: sha256 is not the one stated; {again}")
        for name, kind in _FIELDS.items():
            if type(header.get(name)) is not kind:
                raise ModelError(
                    f"{path}: header.{name} = {show(header.get(name))}: expected "
                    f"{kind.__name__}; {again}"
                )
        expected = _first_byte(length) + header["bytes"]
        if size != expected:
            raise ModelError(
                f"{path}: {size} bytes, the header tells of {expected}: it is cut off or damaged; "
                f"{again}"
            )
        pieces = tuple(_pieces(path, header["pieces"], _first_byte(length), size, again))
        return cls(
            path,
            header["weights"],
            header["config"],
            tuple(map(str, header["warnings"])),
            header["bytes"],
            again,
            _rope_shapes(path, header["ropes"], pieces, again),
            pieces,
        )

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raises ModelError where the decoder that it was packed for is not this one."""
        for name in sorted({*config, *self.config}):
            packed, asked = self.config.get(name), config.get(name)
            if packed != asked:
                raise ModelError(
                    f"{self.path}: header.config.{name} = {show(packed)}, the model's "
                    f"configuration says {show(asked)}: they do not belong together; {self.remedy}"
                )

    def give(self, decoder: Any, max_position: int) -> frozenset[int]:
        """Map all weights into a _core.LlamaDecoder, and the rotary tables that are long enough.

        Returns the numbers of those tables. Raises ModelError naming the piece.
        """
        try:
            with self.path.open("rb") as file:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    check_once(self.path, "checked", lambda: self._check_pieces(mapped))
                    given = self._give_ropes(decoder, mapped, max_position)
                weights = [piece[:5] for piece in self._pieces if not _is_rope(piece)]
                _core.map_packs(decoder, file.fileno(), str(self.path), weights)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path}: {error}; {self.remedy}") from error
        return given

    def _check_pieces(self, mapped: mmap.mmap) -> None:
        with memoryview(mapped) as whole:
            for name, kind, n, k, first, digest in self._pieces:
                with whole[first : first + _core.packed_bytes(kind, n, k)] as data:
                    found = hashlib.sha256(data).hexdigest()
                if found != digest:
                    raise ModelError(
                        f"{self.path}: piece {name!r}: sha256 is {found}, expected {digest}: it "
                        f"was altered or is damaged; {self.remedy}"
                    )

    def _give_ropes(self, decoder: Any, mapped: mmap.mmap, max_position: int) -> frozenset[int]:
        places = {piece[0]: piece[4] for piece in self._pieces if _is_rope(piece)}
        given = set()
        for index, (rows, columns) in self._ropes.items():
            if rows < max_position:
                continue
            tables = [
                np.frombuffer(mapped, "<f4", max_position * columns, places[f"rope.{index}.{name}"])
                .reshape(max_position, columns)
                .copy()
                for name in ("cos", "sin")
            ]
            decoder.set_rope(index, *tables)
            given.add(index)
        return frozenset(given)


def _is_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_rope(piece: _Piece) -> bool:
    return piece[0].startswith("rope.")


def _pieces(path: Path, entries: list[Any], begin: int, size: int, again: str) -> Iterator[_Piece]:
    """The pieces with their first bytes in the file, each within it and after the one before."""
    end, kinds = begin, (str, str, int, int, int, str)
    for place, entry in enumerate(entries):
        where = f"{path}: header.pieces[{place}]"
        if (
            not isinstance(entry, list)
            or len(entry) != len(kinds)
            or any(type(value) is not kind for value, kind in zip(entry, kinds, strict=True))
        ):
            raise ModelError(f"{where} = {show(entry)}: expected {len(kinds)} fields; {again}")
        name, kind, n, k, offset, digest = entry
        try:
            length = _core.packed_bytes(kind, n, k)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{where} ({show(name)}): type {show(kind)}; {again}") from error
        if length < 0:
            raise ModelError(f"{where} ({show(name)}): [{n}, {k}] {kind} is no weight; {again}")
        first = begin + offset
        if first < end or offset % _ALIGNMENT or first + length > size:
            raise ModelError(
                f"{where} ({show(name)}): {length} bytes at {offset}: outside the file, not at a "
                f"multiple of {_ALIGNMENT}, or within another piece; {again}"
            )
        end = first + length
        yield name, kind, n, k, first, digest


def _rope_shapes(
    path: Path, entries: dict[str, Any], pieces: Sequence[_Piece], again: str
) -> dict[int, tuple[int, int]]:
    there = {piece[0]: piece[2] for piece in pieces if _is_rope(piece)}
    shapes: dict[int, tuple[int, int]] = {}
    for index, shape in entries.items():
        is_shape = (
            isinstance(shape, list)
            and len(shape) == 2
            and all(type(n) is int and n > 0 for n in shape)
            and index.isdecimal()
        )
        if not is_shape or any(
            there.pop(f"rope.{index}.{name}", 0) != shape[0] * shape[1] for name in ("cos", "sin")
        ):
            raise ModelError(f"{path}: header.ropes[{index!r}] = {show(shape)}: has no such "
                             f"tables; {again}")  # fmt: skip
        shapes[int(index)] = (shape[0], shape[1])
    if there:
        raise ModelError(f"{path}: piece {next(iter(there))!r} has no entry in ropes; {again}")
    return shapes
