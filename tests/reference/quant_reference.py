"""Block formats and the linear layer over them, in NumPy and by their definitions.

A row is groups of 32 elements, w = scale * (u - zero) + min, with one scale for each 16 of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# format -> elements and bytes of a block
FORMATS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
# Not GGUF's: q4_1 and q8_0 with float32 in the place of float16.
OWN_FORMATS = {"q4_g": (32, 24), "q8_g": (32, 36)}


@dataclass
class Groups:
    """codes int64 [N, G, 32], zero taken off; scale float32 [N, G, 2]; min float32 [N, G]."""

    codes: np.ndarray
    scale: np.ndarray
    min: np.ndarray
    two_scales: bool
    has_min: bool

    def values(self) -> np.ndarray:
        """float32 [N, K], each product and each sum rounded."""
        scale = np.repeat(self.scale, 16, axis=2)
        values = scale * self.codes.astype(np.float32) + self.min[:, :, None]
        return values.reshape(len(values), -1)


def read_groups(name: str, blocks: np.ndarray) -> Groups:
    """The groups of uint8 [N, bytes of a row]."""
    rows = blocks.reshape(len(blocks), -1, (FORMATS | OWN_FORMATS)[name][1])
    if name == "q8_g":
        codes = rows[..., 4:].view(np.int8).astype(np.int64)
        return _of_small_blocks(codes, _single(rows[..., :4]), None)
    if name == "q4_g":
        packed = rows[..., 8:].astype(np.int64)
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
        return _of_small_blocks(codes, _single(rows[..., :4]), _single(rows[..., 4:8]))
    if name == "q8_0":
        codes = rows[..., 2:].view(np.int8).astype(np.int64)
        return _of_small_blocks(codes, _half(rows[..., :2]), None)
    if name in ("q5_0", "q5_1"):
        head = 2 if name == "q5_0" else 4
        fifth = np.unpackbits(rows[..., head : head + 4], axis=-1, bitorder="little")
        packed = rows[..., head + 4 :].astype(np.int64)
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1) + 16 * fifth.astype(np.int64)
        low = _half(rows[..., 2:4]) if name == "q5_1" else None
        return _of_small_blocks(codes - 16 * (low is None), _half(rows[..., :2]), low)
    if name in ("q4_0", "q4_1"):
        packed = rows[..., 4 if name == "q4_1" else 2 :].astype(np.int64)
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
        codes = codes - 8 if name == "q4_0" else codes
        low = _half(rows[..., 2:4]) if name == "q4_1" else None
        return _of_small_blocks(codes, _half(rows[..., :2]), low)
    if name == "q6_k":
        return _read_q6_k(rows, _half(rows[..., 208:]))
    return _read_q45_k(rows, _half(rows[..., :2]), _half(rows[..., 2:4]), name == "q5_k")


def _half(part: np.ndarray) -> np.ndarray:
    """Two bytes at the end of each block as a float."""
    return np.ascontiguousarray(part).view(np.float16)[..., 0].astype(np.float32)


def _single(part: np.ndarray) -> np.ndarray:
    """Four bytes at the end of each block as a float."""
    return np.ascontiguousarray(part).view(np.float32)[..., 0]


def _of_small_blocks(codes: np.ndarray, scale: np.ndarray, low: np.ndarray | None) -> Groups:
    has_min = low is not None
    low = low if has_min else np.zeros_like(scale)
    return Groups(codes, np.stack([scale, scale], axis=-1), low, False, has_min)


def _read_q45_k(rows: np.ndarray, d: np.ndarray, d_min: np.ndarray, fifth: bool) -> Groups:
    n, blocks, _ = rows.shape
    bits = rows[..., 4:16].astype(np.int64)
    first, second, third = bits[..., :4], bits[..., 4:8], bits[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    nibbles = rows[..., 48 if fifth else 16 :].reshape(n, blocks, 4, 32).astype(np.int64)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=3).reshape(n, blocks, 8, 32)
    if fifth:
        high = rows[..., 16:48].astype(np.int64)[:, :, None, :]
        codes = codes | (high >> np.arange(8)[:, None] & 1) << 4
    scale = d[..., None] * scales.astype(np.float32)
    low = -(d_min[..., None] * minima.astype(np.float32))
    flat = scale.reshape(n, -1)
    scale = np.stack([flat, flat], axis=-1)
    return Groups(codes.reshape(n, -1, 32), scale, low.reshape(n, -1), False, True)


def _read_q6_k(rows: np.ndarray, d: np.ndarray) -> Groups:
    n, blocks, _ = rows.shape
    nibbles = rows[..., :128].reshape(n, blocks, 2, 2, 32).astype(np.int64)
    pairs = rows[..., 128:192].reshape(n, blocks, 2, 1, 32).astype(np.int64)
    low = np.concatenate([nibbles & 15, nibbles >> 4], axis=3)
    codes = (low | (pairs >> np.array([0, 2, 4, 6])[:, None] & 3) << 4) - 32
    scales = rows[..., 192:208].view(np.int8).astype(np.float32)
    scale = (d[..., None] * scales).reshape(n, -1, 2)
    low = np.zeros(scale.shape[:2], np.float32)
    return Groups(codes.reshape(n, -1, 32), scale, low, True, False)


def quantize_rows(x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """float32 [R, K] -> twice: whole numbers int64 [R, G, 32], scales float32 [R, G].

    The second pair holds what rounding to the first left of blocks of which one element holds more
    than three quarters of the sum of squares, as rounded; zeros elsewhere.
    """
    groups = x.reshape(len(x), -1, 32)
    q, scale = _quantize_groups(groups)
    second = (3 * (q * q).sum(axis=-1) < 4 * 127**2) & (scale > 0)
    with np.errstate(invalid="ignore"):
        left = groups - scale[..., None] * q.astype(np.float32)
    return [(q, scale), _quantize_groups(np.where(second[..., None], left, np.float32(0)))]


def _quantize_groups(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = np.abs(groups).max(axis=-1)  # NaN where one is
    finite = np.isfinite(largest)
    used = finite & (largest > np.float32(1e-30))
    inverse = np.float32(127) / np.where(used, largest, np.float32(1))
    scaled = np.where(used[..., None], groups * inverse[..., None], np.float32(0))
    scale = np.where(used, largest / np.float32(127), np.float32(0))
    return np.rint(scaled).astype(np.int64), np.where(finite, scale, np.float32(np.nan))


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c, rounded once.

    The product of two float32 numbers is exact in float64. Their sum is rounded to odd there: to
    the neighbour whose last bit is set, if it isn't exact. Then rounding to float32 is that of the
    exact sum.
    """
    product, c = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c)
    total = product + c
    with np.errstate(invalid="ignore"):
        kept = total - product
        error = (product - (total - kept)) + (c - kept)
        even = total.view(np.int64) & 1 == 0
        towards = np.where(error > 0, np.inf, -np.inf)
        total = np.where(even & (error != 0), np.nextafter(total, towards), total)
    return total.astype(np.float32)


def quant_linear(groups: Groups, x: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """float32 [R, N]: the sum that cpp/backend/cpu/linear/quant_kernels.h states, bit for bit."""
    rounded = quantize_rows(x)
    y = np.zeros((len(x), len(groups.codes)), np.float32)
    parts = (slice(0, 16), slice(16, 32)) if groups.two_scales else (slice(0, 32),)
    for g in range(x.shape[1] // 32):
        for q, x_scale in rounded:
            scales = x_scale[:, g, None]
            for part in parts:
                whole = (q[:, g, part] @ groups.codes[:, g, part].T).astype(np.float32)
                y = _fused(whole, groups.scale[:, g, part.start // 16] * scales, y)
            if groups.has_min:
                total = scales[:, 0] * q[:, g].sum(axis=-1).astype(np.float32)
                y = _fused(groups.min[:, g], total[:, None], y)
    return y if bias is None else y + bias
