"""The tensors of a GGUF file under transformers' names: in their own width, or as floats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..errors import ModelError
from ..gguf import GgufFile, GgufTensor
from .gguf_config import LENGTH_FACTORS, ROPE_FACTORS, architecture_of
from .host_arrays import HostArray, converted, dtype_name
from .weights import check_tensors

__all__ = ["GgufCheckpoint", "Weight"]

# A float tensor, or blocks uint8 [N, bytes of a row] and their format.
Weight = HostArray | tuple[np.ndarray, str]

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Projections that read the same input.
_STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class GgufCheckpoint:
    """As Checkpoint, of one file.

    warnings    grows while tensors are loaded
    bytes_read  grows, too: of the tensors that were loaded, as the file has them

    Raises ModelError for a tensor that has no place in its architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self.bytes_read = 0
        self._file = GgufFile(path)
        self._architecture = architecture_of(self._file)
        prefix = self._file.text("general.architecture") + ".attention.head_count"
        heads = self._file.whole(prefix, 1, 1 << 16)
        # Heads of the rows that are in llama.cpp's rotary order.
        self._rotary = {
            "q_proj": heads,
            "k_proj": self._file.whole(prefix + "_kv", 1, 1 << 16, heads),
        }
        is_phi3 = self._architecture.model_type == "phi3"
        factors = (ROPE_FACTORS, *LENGTH_FACTORS) if is_phi3 else (ROPE_FACTORS,)
        self._tensors = {
            self._name(name): tensor
            for name, tensor in self._file.tensors.items()
            if name not in factors
        }

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def drop_pages(self) -> None:
        """See Checkpoint."""
        self._file.drop_pages()

    def _name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        if module in _GLOBAL:
            return f"{_GLOBAL[module]}.{kind}"
        block, _, part = module.removeprefix("blk.").partition(".")
        layer = self._architecture.layer
        if not module.startswith("blk.") or not block.isdecimal() or part not in layer:
            raise ModelError(
                f"{self.path}: tensor {name!r} has no place in a {self._architecture.model_type} "
                "model; a parameter is never ignored"
            )
        return f"model.layers.{int(block)}.{layer[part]}.{kind}"

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        ignored: Iterable[str] = (),
        ignored_suffixes: tuple[str, ...] = (),
    ) -> None:
        """It must hold exactly `expected` (name -> shape), besides the ignored names."""
        check_tensors(
            {
                name: (self.path, tensor.name, tensor.shape)
                for name, tensor in self._tensors.items()
            },
            expected,
            where=self.path,
            described_by="its metadata",
            ignored=ignored,
            ignored_suffixes=ignored_suffixes,
        )

    def main_format(self) -> str:
        """The type that holds most elements of matrices."""
        size: dict[str, int] = {}
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                size[tensor.format] = size.get(tensor.format, 0) + math.prod(tensor.shape)
        return max(size, key=lambda name: size[name])

    def load(self, name: str, dtype: str | None = None, rows: slice | None = None) -> HostArray:
        """One tensor, or these rows of it, as floats."""
        tensor = self._tensors[name]
        data = self._read(name, rows)
        if tensor.is_quantised:
            if len(tensor.shape) != 2:
                raise ModelError(
                    f"{self.path}: tensor {tensor.name!r} is {tensor.format} and no matrix; the "
                    "file is damaged"
                )
            values: HostArray = np.empty((len(data), tensor.shape[1]), dtype=np.float32)
            _core.dequantize((np.ascontiguousarray(data), tensor.format), values)
            bad = _core.count_not_finite(values)
            if bad:  # as the native decoder, which takes the blocks themselves
                raise ModelError(
                    f"{self.path}: tensor {tensor.name!r} in {tensor.format} holds {bad} values "
                    "under scales that are NaN or infinite; the file is damaged"
                )
        else:
            is_bf16 = tensor.format == "bfloat16"
            data = np.ascontiguousarray(data)
            values = _core.Bfloat16Array(data) if is_bf16 else data
        if name.endswith("norm.weight") and self._architecture.norm_shift:
            wide: Any = converted(values, "float32")
            shifted = wide - np.float32(self._architecture.norm_shift)
            values = converted(shifted, dtype_name(values))
        if _core.count_not_finite(values):
            self.warnings.append(
                f"{self.path.name}: tensor {tensor.name!r} holds NaN or infinite values; requests "
                "that meet them end with an error"
            )
        return values if dtype is None else converted(values, dtype)

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        """One tensor, or these rows of it, in its own width, as the native decoder takes it. Those
        that read the same input are floats if one of them is."""
        tensor = self._tensors[name]
        if len({self._input_form(other) for other in self._stack(name)}) > 1:
            return self.load(name, "float32", rows)
        if not tensor.is_quantised or len(tensor.shape) != 2:
            return self.load(name, rows=rows)
        return np.ascontiguousarray(self._read(name, rows)), tensor.format

    def _stack(self, name: str) -> list[GgufTensor]:
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        for stack in _STACKS:
            if last in stack and kind == "weight":
                return [self._tensors[f"{parent}.{other}.weight"] for other in stack]
        return [self._tensors[name]]

    @staticmethod
    def _input_form(tensor: GgufTensor) -> str:
        if tensor.is_quantised:
            return "blocks"
        return "bfloat16" if tensor.format == "bfloat16" else "float32"

    def _read(self, name: str, rows: slice | None) -> np.ndarray:
        """The bits of a tensor, or of these rows of it: of q and k whole heads, in the order of
        transformers, which is the two halves of a head."""
        heads = self._rotary.get(name.rpartition(".")[0].rpartition(".")[2], 0)
        array: np.ndarray = self._file.data(self._tensors[name])
        if rows is not None:
            heads = heads * (rows.stop - rows.start) // len(array)
            array = array[rows]
        self.bytes_read += array.nbytes
        if not self._architecture.permutes or not heads:
            return array
        pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)
