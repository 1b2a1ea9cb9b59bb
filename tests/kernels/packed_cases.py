"""Weights in blocks, hostile ones among them, and what they stand for, in plain NumPy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from cuda_calls import Target
from linear_cases import Layer, call, make_layer

from specdec_ext import ops
from specdec_ext.ops.weight_blocks import E4M3_FORMATS

# Formats, some with a way in which the scales are drawn: "/32" for each 32 k, "/full" with 24 bits.
HALF_FORMATS = ("q8_0", "q4_0", "q4_1")
WIDE_FORMATS = (
    "q4_g", "q4_g/32", "q4_g/full", "q8_g", "q8_g/32", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k",
    "f8_g",
)  # fmt: skip
FORMATS = (*HALF_FORMATS, *WIDE_FORMATS)
# Elements and bytes of a block.
BLOCKS = {
    "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q4_g": (32, 24), "q8_g": (32, 36),
    "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "f8_g": (64, 68), "f8_a8": (64, 68),
    "q5_0": (32, 22), "q5_1": (32, 24),
}  # fmt: skip
# What a case is kept as where that is not its format, and the bits of an element there.
KEPT = {"q4_g/32": "q4_k", "q4_g/full": "q5_k", "q8_g/32": "q6_k", "q5_0": "q8_0", "q5_1": "q5_k"}
BITS = {"q8_0": 8.5, "q4_0": 4.5, "q4_1": 5, "q4_g": 5, "q4_k": 6, "q8_g": 8.5, "q5_k": 10,
        "q6_k": 10, "f8_g": 8.5}  # fmt: skip
# (first byte, dtype) of a block's scales, and of its minimums, where they are numbers of a type.
FACTORS = {
    "q8_0": [(0, "<f2")], "q4_0": [(0, "<f2")], "q4_1": [(0, "<f2"), (2, "<f2")],
    "q4_g": [(0, "<f4"), (4, "<f4")], "q8_g": [(0, "<f4")], "f8_g": [(0, "<f4")],
    "f8_a8": [(0, "<f4")],
    "q4_k": [(0, "<f2"), (2, "<f2")], "q5_k": [(0, "<f2"), (2, "<f2")], "q6_k": [(208, "<f2")],
    "q5_0": [(0, "<f2")], "q5_1": [(0, "<f2"), (2, "<f2")],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PackedLayer:
    """x [R, K], blocks uint8 [N, bytes of a row] in `format`, bias [N] or None, on the CPU."""

    x: torch.Tensor
    blocks: np.ndarray
    format: str
    bias: torch.Tensor | None

    def rows(self, which: slice | list[int]) -> PackedLayer:
        return dataclasses.replace(self, x=self.x[which])

    def floats(self) -> Layer:
        """The same with the weight's elements, rounded to the dtype of x."""
        weight = torch.from_numpy(dequantised(self.blocks, self.format))
        return Layer(self.x, weight.to(self.x.dtype), self.bias)


def e4m3(code: int) -> np.float32:
    """By the definition; NaN is no number of a weight."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.float32(-size if code & 128 else size)


def get(block: np.ndarray, format: str, which: int) -> np.float32:
    """A block's scale (0) or minimum (1)."""
    first, dtype = FACTORS[format][which]
    return np.float32(block[first : first + int(dtype[2])].view(dtype)[0])


def of_six_bits(block: np.ndarray, format: str) -> list[np.float32]:
    """The elements of a block of q4_k or q5_k."""
    d, least, packed = get(block, format, 0), get(block, format, 1), [int(b) for b in block[4:16]]
    fifth, low = block[16:48], block[48:] if format == "q5_k" else block[16:]
    values = []
    for i in range(256):
        j = i // 32
        if j < 4:
            scale, minimum = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
            minimum = packed[j + 4] >> 4 | packed[j] >> 6 << 4
        byte = int(low[i // 64 * 32 + i % 32])
        number = byte & 15 if i % 64 < 32 else byte >> 4
        if format == "q5_k":
            number += (int(fifth[i % 32]) >> j & 1) * 16
        values.append(d * np.float32(scale) * np.float32(number) - least * np.float32(minimum))
    return values


def of_q6_k(block: np.ndarray) -> list[np.float32]:
    d, scales = get(block, "q6_k", 0), block[192:208].view(np.int8)
    values = []
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        byte = int(block[half * 64 + quarter % 2 * 32 + place])
        low = byte & 15 if quarter < 2 else byte >> 4
        high = int(block[128 + half * 32 + place]) >> 2 * quarter & 3
        values.append(d * np.float32(int(scales[i // 16])) * np.float32(low + 16 * high - 32))
    return values


def of_block(block: np.ndarray, format: str) -> list[np.float32]:
    if format == "q6_k":
        return of_q6_k(block)
    if format in ("q4_k", "q5_k"):
        return of_six_bits(block, format)
    first, dtype = FACTORS[format][-1]
    data, scale = block[first + int(dtype[2]) :], get(block, format, 0)
    if format in ("q8_0", "q8_g"):
        return [np.float32(int(q)) * scale for q in data.view(np.int8)]
    if format in E4M3_FORMATS:
        return [e4m3(int(code)) * scale for code in data]
    fifth = int.from_bytes(bytes(data[:4]), "little") if format in ("q5_0", "q5_1") else 0
    data = data[4:] if format in ("q5_0", "q5_1") else data
    numbers = [int(b) & 15 for b in data] + [int(b) >> 4 for b in data]
    numbers = [n + 16 * (fifth >> i & 1) for i, n in enumerate(numbers)]
    if format in ("q4_0", "q5_0"):
        zero = 8 if format == "q4_0" else 16
        return [np.float32(n - zero) * scale for n in numbers]
    minimum = get(block, format, 1)
    return [np.float32(n) * scale + minimum for n in numbers]


def dequantised(blocks: np.ndarray, format: str) -> np.ndarray:
    """float32 [N, K], element by element as the format's definition says."""
    format = format.split("/")[0]
    size = BLOCKS[format][1]
    with np.errstate(over="ignore", invalid="ignore"):
        rows = [
            [v for first in range(0, len(row), size) for v in of_block(row[first:][:size], format)]
            for row in blocks
        ]
    return np.array(rows, dtype=np.float32)


def fitting(depth: int, format: str) -> int:
    """The least number of whole blocks' elements that is not below it."""
    elements = BLOCKS[format.split("/")[0]][0]
    return -(-depth // elements) * elements


def set_factor(
    blocks: np.ndarray, format: str, which: int, values: np.ndarray | float, rows: object = ...
) -> None:
    """Scales (0) or minimums (1) of all blocks of these rows, in place."""
    format = format.split("/")[0]
    first, dtype = FACTORS[format][which]
    view = blocks.reshape(len(blocks), -1, BLOCKS[format][1])[..., first : first + int(dtype[2])]
    wide = np.broadcast_to(np.asarray(values, dtype), view[rows].shape[:-1])
    view[rows] = np.ascontiguousarray(wide)[..., None].view(np.uint8)


def random_blocks(columns: int, depth: int, format: str, seed: int = 1) -> np.ndarray:
    """Every number of the format; scales of both signs, zero, subnormal and rather large."""
    rng = np.random.default_rng(seed)
    format, _, drawn = format.partition("/")
    elements, bytes_of_block = BLOCKS[format]
    count = depth // elements
    blocks = rng.integers(0, 256, (columns, count * bytes_of_block)).astype(np.uint8)
    # Largest magnitudes of the numbers, small scales of the K formats included.
    largest = {
        "q8_0": 128,
        "q8_g": 128,
        "f8_g": 448,
        "f8_a8": 448,
        "q4_k": 945,
        "q5_k": 1953,
        "q6_k": 4096,
    }
    size = 0.8 / math.sqrt(depth) / largest.get(format, 8)

    def factors(is_scale: bool) -> np.ndarray:
        values = rng.standard_normal((columns, count)) * size
        which = rng.integers(0, 40, values.shape)
        values = np.where(which == 0, 0.0, values)
        values = np.where(which == 1, 2.0**-24 * np.sign(values), values)
        values = np.where(which == 2, values * 100, values)
        if format in ("q4_g", "q8_g") and not drawn and count % 2 == 0:
            values[:, 1::2] = values[:, ::2]
        values = values.astype(np.float32)
        if format == "q4_g" and is_scale and drawn != "full":  # 20 bits
            values = (values.view(np.int32) & ~15).view(np.float32)
        return values

    for which in range(len(FACTORS[format])):
        set_factor(blocks, format, which, factors(which == 0))
    if format in E4M3_FORMATS:
        codes = blocks.reshape(columns, count, bytes_of_block)[..., 4:]
        codes[codes & 127 == 127] ^= 1
    return blocks


def make_packed(
    rows: int, columns: int, depth: int, dtype: torch.dtype, format: str, *, bias: bool = True
) -> PackedLayer:
    """The depth is made fit for the format."""
    depth = fitting(depth, format)
    layer = make_layer(rows, columns, depth, dtype, bias=bias)
    return PackedLayer(layer.x, random_blocks(columns, depth, format), format, layer.bias)


def pack(target: Target, layer: PackedLayer) -> ops.PackedWeight:
    blocks = target.put(torch.from_numpy(layer.blocks))
    return ops.pack_weight(blocks, layer.format.split("/")[0])


def run_packed(
    target: Target,
    layer: PackedLayer,
    *,
    weight: ops.PackedWeight | None = None,
    out_shift: int = 8,
    aside: bool = True,
) -> torch.Tensor:
    """The call's result."""
    weight = weight or pack(target, layer)
    return call(target, layer.x, weight, layer.bias, out_shift=out_shift, aside=aside)
