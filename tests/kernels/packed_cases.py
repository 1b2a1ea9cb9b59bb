"""Weights in blocks of GGUF, hostile ones among them, and what they stand for, in plain NumPy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from cuda_calls import Target
from linear_cases import Layer, call, make_layer

from specdec_ext import ops

FORMATS = ("q8_0", "q4_0", "q4_1")
SIZES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


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


def dequantised(blocks: np.ndarray, format: str) -> np.ndarray:
    """float32 [N, K], element by element as the format's definition says."""
    size = SIZES[format]
    rows = []
    for row in blocks:
        values: list[np.float32] = []
        for first in range(0, len(row), size):
            block = row[first : first + size]
            scale = np.float32(block[:2].view(np.float16)[0])
            if format == "q8_0":
                values += [np.float32(int(q)) * scale for q in block[2:].view(np.int8)]
                continue
            data = block[4:] if format == "q4_1" else block[2:]
            numbers = [int(b) & 15 for b in data] + [int(b) >> 4 for b in data]
            if format == "q4_0":
                values += [np.float32(n - 8) * scale for n in numbers]
            else:
                minimum = np.float32(block[2:4].view(np.float16)[0])
                values += [np.float32(n) * scale + minimum for n in numbers]
        rows.append(values)
    return np.array(rows, dtype=np.float32)


def random_blocks(columns: int, depth: int, format: str, seed: int = 1) -> np.ndarray:
    """Every number of the format; scales of both signs, zero, subnormal and rather large."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (columns, depth // 32, SIZES[format])).astype(np.uint8)
    size = 0.1 / math.sqrt(depth) / (1 if format != "q8_0" else 16)

    def factors() -> np.ndarray:
        values = rng.standard_normal((columns, depth // 32, 1)) * size
        which = rng.integers(0, 40, values.shape)
        values = np.where(which == 0, 0.0, values)
        values = np.where(which == 1, 2.0**-24 * np.sign(values), values)
        values = np.where(which == 2, values * 100, values)
        return values.astype(np.float16).view(np.uint8)

    blocks[..., :2] = factors()
    if format == "q4_1":
        blocks[..., 2:4] = factors()
    return blocks.reshape(columns, -1)


def make_packed(
    rows: int, columns: int, depth: int, dtype: torch.dtype, format: str, *, bias: bool = True
) -> PackedLayer:
    layer = make_layer(rows, columns, depth, dtype, bias=bias)
    return PackedLayer(layer.x, random_blocks(columns, depth, format), format, layer.bias)


def pack(target: Target, layer: PackedLayer) -> ops.PackedWeight:
    return ops.pack_weight(target.put(torch.from_numpy(layer.blocks)), layer.format)


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
