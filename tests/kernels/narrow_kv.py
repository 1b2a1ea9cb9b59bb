"""8-bit K/V written down a second time, in NumPy, element by element; problems stored in it."""

from __future__ import annotations

import bisect
import dataclasses
import math

import numpy as np
import torch
from reference_attention import Problem

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
SCALE_BYTES = 4


def e4m3_values() -> list[float]:
    """What each of the 256 codes stands for."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            size = math.nan
        elif exponent == 0:
            size = mantissa * 2.0**-9
        else:
            size = (8 + mantissa) * 2.0 ** (exponent - 10)
        values.append(-size if code & 128 else size)
    return values


_SIZES = e4m3_values()[:127]


def e4m3_code(value: float) -> int:
    """The nearest code, ties to the even one; what is larger than 448 becomes 448."""
    sign = 128 if math.copysign(1.0, value) < 0 else 0
    if math.isnan(value):
        return sign | 127
    size = min(abs(value), 448.0)
    above = bisect.bisect_left(_SIZES, size)
    near = [code for code in (above - 1, above) if 0 <= code < len(_SIZES)]
    return sign | min(near, key=lambda code: (abs(_SIZES[code] - size), code & 1))


def int8_vector(x: np.ndarray) -> bytes:
    """The bytes of a float32 vector: its numbers, then their scale. All arithmetic is float32."""
    if not np.isfinite(x).all():
        return bytes(len(x)) + np.float32(np.nan).tobytes()
    most = np.abs(x).max()
    if most <= np.float32(1e-30):
        return bytes(len(x)) + np.float32(0).tobytes()
    inverse = np.float32(127) / most
    numbers = np.rint(x * inverse).astype(np.int8)  # ties to even
    return numbers.tobytes() + (most / np.float32(127)).tobytes()


def int8_pages(wide: torch.Tensor) -> torch.Tensor:
    """float32 pages [..., K] as int8 pages [..., K + 4]."""
    rows = wide.numpy().reshape(-1, wide.shape[-1])
    content = b"".join(int8_vector(row) for row in rows)
    shape = (*wide.shape[:-1], wide.shape[-1] + SCALE_BYTES)
    return torch.frombuffer(bytearray(content), dtype=INT8).view(shape)


def int8_values(pages: torch.Tensor) -> torch.Tensor:
    """int8 pages as the float32 numbers that they stand for."""
    numbers = pages[..., :-SCALE_BYTES].float()
    scales = pages[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return numbers * scales


def narrow(
    problem: Problem,
    dtype: torch.dtype,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[Problem, Problem]:
    """A problem of float32 pages with its K/V in 8 bits, and with float32 pages of the values that
    those stand for. Unused slots, NaN before, are NaN in both: codes of NaN, scales of NaN."""
    pages = problem.k_pages, problem.v_pages
    if dtype == INT8:
        stored = [int8_pages(wide) for wide in pages]
        values = [int8_values(part) for part in stored]
        scales: dict[str, torch.Tensor | None] = {}
    else:
        stored = [wide.to(E4M3) for wide in pages]
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        values = []
        for part, scale in zip(stored, (k_scale, v_scale), strict=True):
            one = torch.ones(1) if scale is None else scale
            values.append(part.float() * one[None, :, None, None])
    return (
        dataclasses.replace(problem, k_pages=stored[0], v_pages=stored[1], **scales),
        dataclasses.replace(problem, k_pages=values[0], v_pages=values[1]),
    )
