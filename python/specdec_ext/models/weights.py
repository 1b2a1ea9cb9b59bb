"""Checkpoint tensors of a model folder, one at a time.

safetensors, single or sharded (model.safetensors.index.json). Every shard's header is read and
checked before the first tensor is loaded, so a truncated file, a missing shard or a wrong shape is
one ModelError at once, naming file, tensor, expected and found. Pickle files are refused unless
allowed, and then read with torch.load(weights_only=True, mmap=True).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..config.validate import show
from ..errors import ModelError
from .host_arrays import HostArray, converted, dtype_name, from_torch, num_bytes, row_slice
from .json_file import read_json
from .safetensors_file import FLOATS, SafetensorsFile
from .tied_head import EMBEDDING, HEAD, are_equal

__all__ = ["Checkpoint", "TensorEntry", "check_tensors"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SINGLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

_MAX_NAME = 255
_LOADABLE = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies, and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # torch's name for floats, the safetensors code otherwise


def check_tensors(
    found: Mapping[str, tuple[Path, str, tuple[int, ...]]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    where: Path,
    described_by: str,
    ignored: Iterable[str],
    ignored_suffixes: tuple[str, ...],
    remedy: str = "",
) -> None:
    """The tensors `found` (name -> file, name in it, shape) must be exactly the `expected` ones
    (name -> shape), besides the ignored names. Raises ModelError."""
    for name, shape in expected.items():
        if name not in found:
            near = difflib.get_close_matches(name, found, n=1)
            has = f" (it has {near[0]!r})" if near else ""
            raise ModelError(
                f"{where}: tensor {name!r} {list(shape)} is missing from the checkpoint{has}; the "
                "files are incomplete or of another architecture"
            )
        file, own_name, own_shape = found[name]
        if own_shape != tuple(shape):
            raise ModelError(
                f"{file}: tensor {own_name!r} has shape {list(own_shape)}, {described_by} asks for "
                f"{list(shape)}; the files do not belong together"
            )
    skip = {*expected, *ignored}
    extra = [name for name in found if name not in skip and not name.endswith(ignored_suffixes)]
    if extra:
        file, own_name, own_shape = found[extra[0]]
        raise ModelError(
            f"{file}: tensor {own_name!r} {list(own_shape)} (and {len(extra) - 1} more) has no "
            f"place in the model that {described_by} describes; a parameter is never "
            f"ignored{remedy}"
        )


class Checkpoint:
    """The tensors of one folder.

    entries   name -> TensorEntry, of all shards
    warnings  grows while tensors are loaded: those that hold NaN or infinity
    bytes_read
              grows, too: of the tensors that were loaded, as the file has them

    Raises ModelError for anything that cannot be read as stated above.
    """

    loadable: tuple[str, ...] = _LOADABLE

    def __init__(self, folder: str | Path, *, allow_pickle: bool = False) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        self.warnings: list[str] = []
        self.bytes_read = 0
        self._handles: dict[Path, Any] = {}
        self.is_pickle = False
        if (self.folder / INDEX).is_file():
            self._read_sharded(self.folder / INDEX)
        elif (self.folder / SINGLE).is_file():
            self._read_header(self.folder / SINGLE)
        else:
            self._read_other(allow_pickle)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._handles.clear()

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        ignored: Iterable[str] = (),
        ignored_suffixes: tuple[str, ...] = (),
    ) -> None:
        """It must hold exactly `expected` (name -> shape), besides the ignored names."""
        check_tensors(
            {name: (entry.file, name, entry.shape) for name, entry in self.entries.items()},
            expected,
            where=self.folder,
            described_by="config.json",
            ignored=ignored,
            ignored_suffixes=ignored_suffixes,
            remedy=": check config.json, or use model_impl='transformers'",
        )
        if HEAD in ignored and self.is_pickle and HEAD in self.entries:
            self._check_tied()
        for name in expected:
            entry = self.entries[name]
            if entry.dtype not in self.loadable:
                raise ModelError(
                    f"{entry.file}: tensor {name!r} has dtype {entry.dtype}, supported are "
                    f"{', '.join(_LOADABLE)}; give an unquantized checkpoint"
                )

    def _check_tied(self) -> None:
        """Heads of safetensors were looked at when the configuration was read."""
        if not are_equal(self.read(HEAD), self.read(EMBEDDING)):
            raise ModelError(
                f"{self.entries[HEAD].file}: tensor {HEAD!r} is not {EMBEDDING!r}, and config.json "
                "says tie_word_embeddings = true; set it to false there, or convert the checkpoint "
                "to safetensors"
            )

    def dtype(self) -> str:
        """The floating dtype that holds most elements."""
        count: dict[str, int] = {}
        for entry in self.entries.values():
            elements = 1
            for extent in entry.shape:
                elements *= extent
            if entry.dtype in _LOADABLE:
                count[entry.dtype] = count.get(entry.dtype, 0) + elements
        if not count:
            raise ModelError(f"{self.folder}: no floating-point tensor in the checkpoint")
        return max(count, key=lambda name: count[name])

    def load(self, name: str, dtype: str | None = None, rows: slice | None = None) -> HostArray:
        """One tensor, or these rows of it, contiguous; a view of the mapped file where the dtype
        already fits."""
        tensor = self.read(name, rows)
        self._note_not_finite(name, tensor)
        return tensor if dtype is None else converted(tensor, dtype)

    def read(self, name: str, rows: slice | None = None) -> HostArray:
        """One tensor, or these rows of it, as its file has it, whatever its type is good for."""
        entry = self.entries[name]
        try:
            handle = self._open(entry.file)
            tensor = from_torch(handle[name]) if self.is_pickle else handle.tensor(name)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{entry.file}: tensor {name!r} cannot be read ({error})") from error
        tensor = row_slice(tensor, rows)
        self.bytes_read += num_bytes(tensor)
        return tensor

    def drop_pages(self) -> None:
        """Give back the memory of what was read of the files; arrays of them read it anew."""
        for handle in self._handles.values():
            if isinstance(handle, SafetensorsFile):
                handle.drop_pages()

    def _note_not_finite(self, name: str, tensor: Any) -> None:
        kind = dtype_name(tensor)
        if kind in ("float32", "float16", "bfloat16"):
            bad = _core.count_not_finite(tensor)
        else:
            bad = int((~np.isfinite(tensor)).sum()) if kind == "float64" else 0
        if not bad:
            return
        self.warnings.append(
            f"{self.entries[name].file.name}: tensor {name!r} holds {bad} NaN or infinite values; "
            "requests that meet them end with an error"
        )

    def _read_sharded(self, path: Path) -> None:
        weight_map = read_json(path, "the shard index").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{path}: weight_map is missing or empty; copy the file again")
        root = self.folder.resolve()
        shards: dict[str, Path] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or not file:
                raise ModelError(
                    f"{path}: weight_map[{name!r}] = {show(file)}: expected a file name"
                )
            if file not in shards:
                # Name by name, not by resolved link: caches link shards to blobs elsewhere.
                parts = Path(file).parts
                if "\0" in file or any(len(part) > _MAX_NAME for part in parts):
                    raise ModelError(
                        f"{path}: weight_map[{name!r}] = {show(file)}: no file has such a name (at "
                        f"most {_MAX_NAME} characters, no NUL); copy the file again"
                    )
                if Path(file).is_absolute() or ".." in parts or "\\" in file:
                    raise ModelError(
                        f"{path}: weight_map[{name!r}] = {file!r} leaves the model folder {root}; "
                        "refused"
                    )
                shards[file] = self.folder / file
        for shard in shards.values():
            if not shard.is_file():
                raise ModelError(
                    f"{shard}: shard is missing, {path.name} names it; the download is incomplete"
                )
            self._read_header(shard, index=path)
        for name, file in weight_map.items():
            entry = self.entries.get(name)
            if entry is None or entry.file != shards[file]:
                raise ModelError(
                    f"{shards[file]}: tensor {name!r} is not in this shard, {path.name} says it is"
                )

    def _read_header(self, path: Path, index: Path | None = None) -> None:
        handle = self._open(path)
        for name in handle.names:
            if name in self.entries:
                raise ModelError(
                    f"{path}: tensor {name!r} is also in {self.entries[name].file}; "
                    f"{index.name if index else 'the checkpoint'} is inconsistent"
                )
            code, shape = handle.about(name)
            self.entries[name] = TensorEntry(path, shape, FLOATS.get(code, code))

    def _open(self, path: Path) -> Any:
        handle = self._handles.get(path)
        if handle is None:
            handle = self._open_pickle(path) if self.is_pickle else self._open_safetensors(path)
            self._handles[path] = handle
        return handle

    def _open_safetensors(self, path: Path) -> Any:
        try:
            return SafetensorsFile(path)
        except Exception as error:  # SafetensorError, OSError, header UTF-8
            size = path.stat().st_size if path.exists() else 0
            raise ModelError(
                f"{path}: not a complete safetensors file ({error}; {size} bytes); "
                "copy or download it again"
            ) from error

    def _read_other(self, allow_pickle: bool) -> None:
        pickles = sorted(
            p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth")
        )
        if not pickles:
            raise ModelError(
                f"{self.folder}: neither {SINGLE} nor {INDEX} is there; give a folder with "
                "safetensors weights"
            )
        if not allow_pickle:
            raise ModelError(
                f"{self.folder / pickles[0]}: pickle checkpoints can run code and are refused; "
                "convert to safetensors, or set allow_pickle=True (read with weights_only=True)"
            )
        self.is_pickle = True
        if (self.folder / PICKLE_INDEX).is_file():
            index = read_json(self.folder / PICKLE_INDEX, "the shard index")
            names = sorted({str(v) for v in (index.get("weight_map") or {}).values()})
            if any("/" in n or "\\" in n or n.startswith("..") for n in names):
                raise ModelError(
                    f"{self.folder / PICKLE_INDEX}: weight_map leaves the model folder; refused"
                )
        else:
            names = [PICKLE_SINGLE if PICKLE_SINGLE in pickles else pickles[0]]
        for file in names:
            path = self.folder / file
            for name, tensor in self._open(path).items():
                self.entries[name] = TensorEntry(
                    path, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                )

    def _open_pickle(self, path: Path) -> Any:
        import torch

        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # UnpicklingError, RuntimeError (zip), OSError
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{path}: not a readable torch checkpoint ({reason})") from error
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in content.items()
        ):
            raise ModelError(f"{path}: expected a dictionary of names to tensors (a state dict)")
        return content
