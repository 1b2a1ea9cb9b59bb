"""Weights of a float checkpoint rounded to blocks while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..config.quantization import Quantization
from ..errors import UnsupportedModelError
from .block_config import BLOCKS
from .host_arrays import HostArray, converted

__all__ = [
    "check_quantizable",
    "e4m3_codes",
    "quantized_loader",
    "relative_error",
    "to_blocks",
    "worst_first",
]

_MAX_E4M3 = np.float32(448)
# Elements that are rounded at once: the steps' arrays stay in the cache.
_PART_ELEMENTS = 1 << 18


def quantized_loader(
    load: Callable[..., np.ndarray],
    quantization: Quantization,
    errors: dict[str, float] | None = None,
    *,
    dtype: str,
    tied: bool,
) -> Callable[..., HostArray | tuple[np.ndarray, str]]:
    """`load`, which gives float32, with matrices in blocks; vectors stay float32. Keywords are
    passed on.

    errors  gets relative_error() of every matrix that is loaded, by its name; of one that is
            loaded in parts the largest
    dtype   of matrices that are kept: as they are asked for, or because their rows are no whole
            groups
    tied    the embeddings are the head
    """

    def weight(name: str, **options: Any) -> HostArray | tuple[np.ndarray, str]:
        tensor = load(name, **options)
        if tensor.ndim != 2:
            return tensor
        format = quantization.format_of(name, tied=tied)
        group = _group(quantization, format)
        if format is None or tensor.shape[1] % (group or BLOCKS[format][0]):
            return converted(tensor, dtype)
        blocks = to_blocks(tensor, format, group)
        if errors is not None:
            error, seen = relative_error(tensor, blocks, format), errors.get(name, 0.0)
            errors[name] = seen if error <= seen else error  # NaN stays
        return blocks, format

    return weight


def _group(quantization: Quantization, format: str | None) -> int | None:
    """Elements that share a scale in matrices of `format`; 0: a whole row; None: a block's."""
    return quantization.group_size if format == quantization.format else None


def check_quantizable(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    quantization: Quantization,
    *,
    dtype: str,
    tied: bool,
) -> str | None:
    """A note of the matrices that stay in floats, though nobody asked for that; None: there are
    none. `shapes`: name -> shape of all tensors; for the rest see quantized_loader().

    Raises UnsupportedModelError where not one matrix can be narrowed, and ConfigError.
    """
    stay: dict[str, int] = {}
    narrowed = False
    for name, shape in shapes.items():
        format = quantization.format_of(name, tied=tied) if len(shape) == 2 else None
        if format is None:
            continue
        size = _group(quantization, format) or BLOCKS[format][0]
        if shape[1] % size:
            stay[name] = size
        else:
            narrowed = True
    said = f"quantization = {quantization.plain!r}"
    if not narrowed:
        sizes = " or ".join(str(size) for size in sorted(set(stay.values())))
        raise UnsupportedModelError(
            f"{path}: {said}: no matrix of this model has rows in whole groups of {sizes}; leave "
            "it out, or choose smaller groups"
        )
    if not stay:
        return None
    names = list(stay)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{said}: {len(names)} matrices stay in {dtype}, their rows are no whole groups of "
        f"{max(stay.values())}: {', '.join(names[:3])}{more}"
    )


def relative_error(weight: np.ndarray, blocks: np.ndarray, format: str) -> float:
    """|weight - what its blocks stand for| / |weight| in the Euclidean norm; 0 for a zero matrix,
    NaN where a value is not finite."""
    whole = np.ascontiguousarray(weight, dtype=np.float32)
    values = np.empty_like(whole)
    _core.dequantize((blocks, format), values)
    values -= whole
    size = float(np.linalg.norm(whole))
    return float(np.linalg.norm(values)) / size if size else 0.0


def worst_first(errors: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """The matrices by their errors, those that are no number in front."""
    order = sorted(errors.items(), key=lambda item: (item[1] == item[1], -item[1], item[0]))
    return tuple(order)


def to_blocks(weight: np.ndarray, format: str, group: int | None = None) -> np.ndarray:
    """uint8 [N, bytes of a row] of a weight [N, K], K in whole groups of the format.

    q8_0: scale = largest magnitude / 127. q4_1: minimum and scale span the group in 15 steps. Both
    are rounded to float16 before elements are divided by them, ties go to even. A group that is not
    finite, or too large for float16, gets a scale that the decoder refuses. q8_g and q4_g: the same
    with scales and minima in float32, scales of q4_g in 20 bits. f8_g, f8_a8: scale = largest
    magnitude / 448, float32, of the group, or of the row; elements over it are rounded to e4m3.

    group  elements of a row that share a scale, whole blocks, of q8_g, q4_g and f8_g; 0: the row;
           None: a block. Blocks of a group repeat its scale
    """
    rows = max(1, _PART_ELEMENTS // max(1, weight.shape[1]))
    parts = [_to_blocks(weight[i : i + rows], format, group) for i in range(0, len(weight), rows)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _to_blocks(weight: np.ndarray, format: str, group: int | None) -> np.ndarray:
    elements = BLOCKS[format][0]
    # One scale for a row is what libraries multiply two e4m3 matrices with.
    group = elements if group is None else group
    group = weight.shape[1] if format == "f8_a8" or group == 0 else group
    groups = np.asarray(weight, dtype=np.float32).reshape(weight.shape[0], -1, elements)
    whole = groups.reshape(weight.shape[0], -1, group)

    def spread(values: np.ndarray) -> np.ndarray:
        """[rows, groups] -> [rows, blocks, 1]"""
        return np.repeat(values, group // elements, axis=1)[..., None]

    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if format in ("f8_g", "f8_a8"):
            scale = spread(np.abs(whole).max(-1) / _MAX_E4M3)
            parts = [scale.view(np.uint8), e4m3_codes(np.where(scale == 0, 0, groups / scale))]
        elif format == "q8_g":
            scale = spread(np.abs(whole).max(-1) / np.float32(127))
            codes = np.clip(_steps(groups, scale), -127, 127).astype(np.int8)
            parts = [scale.view(np.uint8), codes.view(np.uint8)]
        elif format == "q4_g":
            low, high = whole.min(-1), whole.max(-1)
            # 20 bits of a scale are what the device's kernels of 4 bits multiply exactly.
            bits = ((high - low) / np.float32(15)).view(np.uint32)
            rounded = (bits + np.uint32(8)) & ~np.uint32(15)
            scale, minimum = spread(rounded.view(np.float32)), spread(low)
            codes = np.clip(_steps(groups - minimum, scale), 0, 15).astype(np.uint8)
            parts = [scale.view(np.uint8), minimum.view(np.uint8)]
            parts.append(codes[..., :16] | codes[..., 16:] << 4)
        elif format == "q8_0":
            scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
            codes = np.clip(_steps(groups, scale), -127, 127).astype(np.int8)
            parts = [scale.view(np.uint8), codes.view(np.uint8)]
        else:
            low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
            scale, minimum = ((high - low) / np.float32(15)).astype(np.float16), low.astype("f2")
            steps = _steps(groups - minimum.astype(np.float32), scale)
            codes = np.clip(steps, 0, 15).astype(np.uint8)
            parts = [scale.view(np.uint8), minimum.view(np.uint8)]
            parts.append(codes[..., :16] | codes[..., 16:] << 4)
    blocks: np.ndarray = np.concatenate(parts, -1).reshape(weight.shape[0], -1)
    return blocks


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """uint8 of float32 values: the nearest e4m3 number, ties to even, at most 448 in magnitude; any
    code for what is not finite."""
    bits = np.minimum(np.abs(values), _MAX_E4M3).astype(np.float32).view(np.uint32)
    # Three bits of the mantissa stay; a carry goes into the exponent, whose bias becomes 7.
    normal = (bits + (bits >> np.uint32(20) & np.uint32(1)) + np.uint32(0x7FFFF)) >> np.uint32(20)
    small = bits.view(np.float32) < np.float32(2.0**-6)  # a multiple of 2^-9
    subnormal = np.rint(np.where(small, bits.view(np.float32), 0) * np.float32(2.0**9))
    codes = np.where(small, subnormal.astype(np.uint32), normal - np.uint32(120 << 3))
    signed: np.ndarray = codes | np.signbit(values).astype(np.uint32) << np.uint32(7)
    return signed.astype(np.uint8)


def _steps(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Whole steps of `scale` in `values`; 0 where it is 0."""
    scale = scale.astype(np.float32)
    steps: np.ndarray = np.nan_to_num(np.rint(np.where(scale == 0, 0, values / scale)))
    return steps
