"""The tensors of a checkpoint that others have quantised (quant_config.py), by transformers' names.

A module's words, scales and zero points stand for one matrix `<module>.weight` [N, K]:
w[n, k] = scale * (u - zero), with a scale for a group of successive k of a row. Whole numbers of 4
and 8 bits, and e4m3, become blocks of the native decoder without loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelError, UnsupportedModelError
from .host_arrays import HostArray, converted
from .quant_config import QuantConfig
from .weights import Checkpoint, TensorEntry

if TYPE_CHECKING:
    from .gguf_weights import Weight

__all__ = ["QuantCheckpoint"]

# The tensor that says "this module is quantised", and those that go with it.
_WORDS = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed"}
_PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_zero_point",
    "weight_g_idx", "weight_scale", "weight_scale_inv", "input_scale",
)  # fmt: skip
# Nibble i of a word of AWQ is column _AWQ_ORDER[i] of eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = ("float32", "bfloat16", "float16")
_STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_GROUP = 32
_SCALED_GROUP = 64  # of e4m3


def _e4m3_values() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3_values()


class QuantCheckpoint(Checkpoint):
    """quant  what config.json says. Raises ModelError, UnsupportedModelError for a tensor that
    contradicts it, by name."""

    loadable = (*Checkpoint.loadable, "4-bit", "8-bit", "e4m3")

    def __init__(self, folder: Path, quant: QuantConfig, dtype: str | None = None) -> None:
        """dtype  of what becomes floats in weight(); None: bfloat16"""
        super().__init__(folder)
        self._quant, self._dtype = quant, dtype or "bfloat16"
        self._modules: dict[str, dict[str, str]] = {}
        self.warnings += [f"{quant.method}: {note}" for note in quant.notes]
        self._files = dict(self.entries)
        for name in list(self.entries):
            module, _, part = name.rpartition(".")
            if self._marks(name, part):
                self._take(module)

    def _marks(self, name: str, part: str) -> bool:
        form = self._quant.form
        if form in _WORDS:
            return part == _WORDS[form]
        wanted = {"int8": "I8", "fp8": "float8_e4m3fn"}[form]
        return part == "weight" and self._files[name].dtype == wanted

    def _take(self, module: str) -> None:
        """The module's tensors become one matrix."""
        names = {p: f"{module}.{p}" for p in (*_PARTS, "weight") if f"{module}.{p}" in self._files}
        for name in names.values():
            self.entries.pop(name, None)
        words = self._files[names.get(_WORDS.get(self._quant.form, "weight"), f"{module}.weight")]
        if len(words.shape) != 2:
            raise ModelError(f"{words.file}: tensor of {module!r} has shape {list(words.shape)}: "
                             "expected a matrix")  # fmt: skip
        a, b = words.shape
        shape = {"awq": (b * 8, a), "gptq": (b, a * 8), "packed": (a, b * 8)}.get(
            self._quant.form, (a, b)
        )
        bits = {"int8": "8-bit", "fp8": "e4m3"}.get(self._quant.form, "4-bit")
        if bits == "4-bit" and words.dtype != "I32":
            raise ModelError(f"{words.file}: tensor of {module!r} has dtype {words.dtype}: 4-bit "
                             "numbers lie in int32 words")  # fmt: skip
        self._modules[f"{module}.weight"] = names
        self.entries[f"{module}.weight"] = TensorEntry(words.file, shape, bits)

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        ignored: Iterable[str] = (),
        ignored_suffixes: tuple[str, ...] = (),
    ) -> None:
        """It must hold exactly `expected` (name -> shape), besides the ignored names and the biases
        of zeros that AutoGPTQ gives to modules which have none."""
        for name in self._modules:
            bias = name.removesuffix("weight") + "bias"
            if bias in self.entries and bias not in expected and not self._any(bias):
                del self.entries[bias]
            self._check_parts(name)
        super().check(expected, ignored=ignored, ignored_suffixes=ignored_suffixes)

    def _any(self, name: str) -> bool:
        """Is there anything but 0 in a tensor?"""
        values: Any = self.read(name)
        if self.entries[name].dtype in _FLOATS:
            values = converted(values, "float32")
        return bool(np.asarray(values).any())

    def _check_parts(self, name: str) -> None:
        """The small tensors of a module that no product needs and that say what the others mean."""
        parts = self._modules[name]
        if self._quant.static_acts or "input_scale" in parts:
            scale = self._scales(name, "input_scale")
            if scale.size != 1:
                self._misshapen(name, "input_scale", "one number")
        if "weight_shape" in parts:
            found, shape = self._array(name, "weight_shape"), self.entries[name].shape
            if found.reshape(-1).tolist() != list(shape):
                full = parts["weight_shape"]
                raise ModelError(
                    f"{self._files[full].file}: tensor {full!r} holds "
                    f"{found.reshape(-1).tolist()[:4]}, the words of {name!r} are of "
                    f"{list(shape)}; the checkpoint is damaged"
                )

    def load(self, name: str, dtype: str | None = None, rows: slice | None = None) -> HostArray:
        """One tensor, or these rows of it, as floats. Raises ModelError for codes that are NaN."""
        if name not in self._modules:
            return super().load(name, dtype, rows)
        codes, zeros, scales = self._numbers(name)
        spread = scales.shape[1]
        wide = (codes if zeros is None else codes - zeros).astype(np.float32)
        groups = wide.reshape(len(wide), spread, -1)
        values = (groups * scales[:, :, None]).reshape(wide.shape)
        values = values if rows is None else values[rows]
        return values if dtype is None else converted(values, dtype)

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        """One tensor, or these rows of it, as the native decoder takes it: blocks without loss, or
        floats. The whole tensor says in which form."""
        if name not in self._modules or not self._stack_is_whole(name):
            return self.load(name, self._dtype, rows)
        if self._quant.form == "fp8":
            blocks = self._scaled_blocks(name, rows)
            if blocks is None:
                return self.load(name, self._dtype, rows)
            return blocks, "f8_a8" if self._quant.acts_fp8 else "f8_g"
        codes, zeros, scales = self._numbers(name)
        columns = codes.shape[1]
        if columns % _GROUP:
            return self.load(name, self._dtype, rows)
        scale = np.repeat(scales, columns // _GROUP // scales.shape[1], axis=1)[:, :, None]
        groups = codes.reshape(len(codes), -1, _GROUP)
        if self._quant.form == "int8":
            parts = [_bytes(scale), groups.astype(np.int8).view(np.uint8)]
            return self._blocks(parts, rows), "q8_g"
        assert zeros is not None
        low = zeros.reshape(groups.shape)[:, :, :1].astype(np.float32)
        numbers = groups.astype(np.uint8)
        packed = numbers[..., :16] | numbers[..., 16:] << 4
        if bool((low == 8).all()) and _fits_float16(scale):
            parts, format = [_bytes(scale.astype(np.float16)), packed], "q4_0"
        else:
            parts, format = [_bytes(scale), _bytes(-scale * low), packed], "q4_g"
        return self._blocks(parts, rows), format

    def _scaled_blocks(self, name: str, rows: slice | None) -> np.ndarray | None:
        """e4m3 codes in groups of 64 with their scale; None: in rows, or under scales, that are no
        whole groups."""
        scale, width = self._fp8_scales(name)
        rows = slice(None) if rows is None else rows
        codes = self._array(name, "weight")[rows]
        if codes.shape[1] % _SCALED_GROUP or width % _SCALED_GROUP:
            return None
        groups = codes.view(np.uint8).reshape(len(codes), -1, _SCALED_GROUP)
        spread = np.repeat(scale[rows], width // _SCALED_GROUP, axis=1)[:, : groups.shape[1], None]
        return self._blocks([_bytes(spread), groups], None)

    @staticmethod
    def _blocks(parts: list[np.ndarray], rows: slice | None) -> np.ndarray:
        """uint8 [rows, bytes of a row], of parts [all rows, blocks, bytes]."""
        whole = np.concatenate(parts, -1)
        return whole.reshape(len(whole), -1)[slice(None) if rows is None else rows]

    def main_format(self) -> str:
        """What the weights are, in words."""
        return f"{self._quant.method} {self._quant.form}"

    def _stack_is_whole(self, name: str) -> bool:
        """Projections that read the same input are all quantised, or all floats."""
        for stack in _STACKS:
            for part in stack:
                if f".{part}.weight" in name:
                    others = [name.replace(part, other) for other in stack]
                    return all(other in self._modules for other in others)
        return True

    def _numbers(self, name: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Numbers [N, K], zero points [N, K] or None, scales float32 [N, groups of a row]."""
        form = self._quant.form
        if form == "fp8":
            return self._fp8_numbers(name)
        if form == "int8":
            codes = self._array(name, "weight").astype(np.float32)
            scale = self._scales(name, "weight_scale").reshape(-1)
            if len(scale) not in (1, len(codes)):
                self._misshapen(name, "weight_scale", f"[1] or [{len(codes)}, 1]")
            self._without(name, "weight_zero_point")
            return codes, None, np.broadcast_to(scale[:, None], (len(codes), 1)).copy()
        rows, columns = self.entries[name].shape
        size = self._quant.group_size or columns
        if columns % size:
            raise ModelError(f"{self.entries[name].file}: tensor {name!r} has rows of {columns}: "
                             f"no whole groups of {size}")  # fmt: skip
        count = columns // size
        return self._unpack(name, rows, columns, count)

    def _unpack(
        self, name: str, rows: int, columns: int, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        form = self._quant.form
        if form == "packed":
            codes = _nibbles(self._array(name, "weight_packed"))  # [N, K / 8, 8]
            numbers = codes.reshape(rows, columns)
            scales = self._scales(name, "weight_scale", (rows, count))
            zeros = np.full((rows, count), 8)
            if not self._quant.symmetric or "weight_zero_point" in self._modules[name]:
                words = self._array(name, "weight_zero_point")
                self._expect(name, "weight_zero_point", words, (rows // 8, count))
                zeros = _nibbles(words).transpose(0, 2, 1).reshape(rows, count)
            self._in_order(name, "weight_g_idx", columns, count)
        else:
            words, packed = self._array(name, "qweight"), self._array(name, "qzeros")
            self._expect(name, "qzeros", packed, (count, rows // 8))
            scales = np.ascontiguousarray(self._scales(name, "scales", (count, rows)).T)
            lanes, zero_lanes = _nibbles(words), _nibbles(packed)
            if form == "awq":
                places = np.argsort(_AWQ_ORDER)
                numbers = lanes[..., places].reshape(columns, rows).T
                zeros = zero_lanes[..., places].reshape(count, rows).T
            else:
                numbers = lanes.transpose(0, 2, 1).reshape(columns, rows).T
                zeros = zero_lanes.reshape(count, rows).T + self._quant.zero_plus
                self._in_order(name, "g_idx", columns, count)
        return numbers, np.repeat(zeros, columns // count, axis=1), scales

    def _fp8_numbers(self, name: str) -> tuple[np.ndarray, None, np.ndarray]:
        codes = _E4M3[self._array(name, "weight").view(np.uint8)]
        bad = int(np.isnan(codes).sum())
        if bad:
            full = self._modules[name]["weight"]
            raise ModelError(
                f"{self._files[full].file}: tensor {full!r} holds {bad} e4m3 values that are NaN; "
                "the checkpoint is damaged"
            )
        scale, width = self._fp8_scales(name)
        if scale.shape[1] == 1:
            return codes, None, scale
        wide = np.repeat(scale, width, axis=1)[:, : codes.shape[1]]
        return codes, None, np.ascontiguousarray(wide)

    def _fp8_scales(self, name: str) -> tuple[np.ndarray, int]:
        """float32 [N, groups of a row], and the columns of a group."""
        rows, columns = self.entries[name].shape
        part = "weight_scale_inv" if "weight_scale_inv" in self._modules[name] else "weight_scale"
        scale = self._scales(name, part)
        block = self._quant.block
        if block is None:
            if scale.size not in (1, rows):
                self._misshapen(name, part, f"[1] or [{rows}, 1]")
            return np.broadcast_to(scale.reshape(-1, 1), (rows, 1)).copy(), columns
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        if scale.shape != grid:
            self._misshapen(name, part, str(list(grid)))
        return np.repeat(scale, block[0], axis=0)[:rows], block[1]

    def _array(self, name: str, part: str) -> np.ndarray:
        full = self._modules[name].get(part)
        if full is None:
            module = name.removesuffix(".weight")
            raise ModelError(
                f"{self.entries[name].file}: tensor {module + '.' + part!r} is missing, "
                f"{self._quant.method} needs it; the files are incomplete"
            )
        entry = self._files[full]
        try:
            return np.asarray(self._open(entry.file).tensor(full))
        except ValueError as error:
            raise ModelError(f"{entry.file}: tensor {full!r} cannot be read ({error})") from error

    def _scales(self, name: str, part: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """float32; finite and not 0."""
        full = self._modules[name].get(part)
        entry = None if full is None else self._files[full]
        if entry is None or full is None:
            self._array(name, part)  # raises
            raise AssertionError
        if entry.dtype not in _FLOATS:
            raise ModelError(f"{entry.file}: tensor {full!r} has dtype {entry.dtype}: scales are "
                             f"{', '.join(_FLOATS)}")  # fmt: skip
        tensor: Any = self._open(entry.file).tensor(full)
        values: Any = converted(tensor, "float32")
        if shape is not None and values.shape != shape:
            self._misshapen(name, part, str(list(shape)))
        bad = ~np.isfinite(values) | (values == 0)
        if bad.any():
            raise ModelError(
                f"{entry.file}: tensor {full!r} holds {int(bad.sum())} scales that are NaN, "
                "infinite or zero; the checkpoint is damaged"
            )
        return np.asarray(values)

    def _misshapen(self, name: str, part: str, expected: str) -> None:
        full = self._modules[name][part]
        entry = self._files[full]
        raise ModelError(
            f"{entry.file}: tensor {full!r} has shape {list(entry.shape)}, expected {expected} for "
            f"{name!r} {list(self.entries[name].shape)}"
        )

    def _expect(self, name: str, part: str, found: np.ndarray, shape: tuple[int, ...]) -> None:
        if found.shape != shape:
            self._misshapen(name, part, str(list(shape)))

    def _without(self, name: str, part: str) -> None:
        if part in self._modules[name]:
            full = self._modules[name][part]
            raise UnsupportedModelError(
                f"{self._files[full].file}: tensor {full!r}: 8-bit weights with zero points are "
                "not supported; give a symmetric checkpoint"
            )

    def _in_order(self, name: str, part: str, columns: int, count: int) -> None:
        """Groups of successive columns: what act-order without a permutation has not."""
        if part not in self._modules[name]:
            return
        index = self._array(name, part)
        if not np.array_equal(index, np.arange(columns) // (columns // count)):
            full = self._modules[name][part]
            raise UnsupportedModelError(
                f"{self._files[full].file}: tensor {full!r}: act-order "
                "without permuted weights (desc_act, actorder) is not supported; give a checkpoint "
                "made without it"
            )


def _nibbles(words: np.ndarray) -> np.ndarray:
    """[..., 8] of int32 words, least significant first."""
    bits = words.view(np.uint32)
    return np.stack([(bits >> np.uint32(4 * i) & np.uint32(15)).astype(np.int32) for i in range(8)],
                    axis=-1)  # fmt: skip


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def _fits_float16(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())
