"""The tensors of a folder whose matrices are blocks (block_config.py): what `specdec convert` makes
of a GGUF file, or with --quantization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import ModelError
from .block_config import BLOCKS
from .host_arrays import HostArray, converted
from .weights import Checkpoint, TensorEntry

if TYPE_CHECKING:
    from .gguf_weights import Weight

__all__ = ["BlockCheckpoint"]


class BlockCheckpoint(Checkpoint):
    """blocks  tensor name -> format of the matrices that are bytes. Raises ModelError."""

    loadable = (*Checkpoint.loadable, *BLOCKS)

    def __init__(self, folder: Path, blocks: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._blocks = blocks
        for name, format in blocks.items():
            elements, size = BLOCKS[format]
            entry = self.entries.get(name)
            if entry is None:
                raise ModelError(
                    f"{folder}: tensor {name!r} is missing, config.json lists it as {format}; "
                    "convert the model again"
                )
            if entry.dtype != "U8" or len(entry.shape) != 2 or entry.shape[1] % size:
                raise ModelError(
                    f"{entry.file}: tensor {name!r} is {entry.dtype} {list(entry.shape)}: rows of "
                    f"{format} are bytes (U8) in blocks of {size}; convert the model again"
                )
            shape = (entry.shape[0], entry.shape[1] // size * elements)
            self.entries[name] = TensorEntry(entry.file, shape, format)

    def load(self, name: str, dtype: str | None = None, rows: slice | None = None) -> HostArray:
        """One tensor, or these rows of it, as floats."""
        weight = self.weight(name, rows)
        if not isinstance(weight, tuple):
            return weight if dtype is None else converted(weight, dtype)
        shape = (len(weight[0]), self.entries[name].shape[1])
        values = np.empty(shape, dtype=np.float32)
        _core.dequantize(weight, values)
        bad = _core.count_not_finite(values)
        if bad:  # as the native decoder, which takes the blocks themselves
            raise ModelError(
                f"{self.entries[name].file}: tensor {name!r} in {weight[1]} holds {bad} values "
                "that are NaN or infinite; the file is damaged, convert the model again"
            )
        return values if dtype is None else converted(values, dtype)

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        """One tensor, or these rows of it, as it is stored, as the native decoder takes it."""
        if name not in self._blocks:
            return super().load(name, rows=rows)
        bytes_of: Any = self.read(name, rows)
        return bytes_of, self._blocks[name]

    def main_format(self) -> str:
        """The type that holds most elements of matrices."""
        size: dict[str, int] = {}
        for entry in self.entries.values():
            if len(entry.shape) == 2:
                elements = entry.shape[0] * entry.shape[1]
                size[entry.dtype] = size.get(entry.dtype, 0) + elements
        return max(size, key=lambda name: size[name])
