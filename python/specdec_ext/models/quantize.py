"""Weights of a float checkpoint rounded to blocks while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .host_arrays import HostArray

__all__ = ["QUANTIZATIONS", "quantized_loader", "to_blocks"]

# LLM(quantization=...): the format of projections, and of the embeddings and the head, which every
# token passes and which few bits hurt most.
QUANTIZATIONS = {"int8": ("q8_0", "q8_0"), "int4": ("q4_1", "q8_0")}
_GROUP = 32


def quantized_loader(
    load: Callable[..., np.ndarray], quantization: str
) -> Callable[..., HostArray | tuple[np.ndarray, str]]:
    """`load` with matrices in blocks; vectors, and rows that are no whole blocks, stay. Keywords
    are passed on."""
    projections, tables = QUANTIZATIONS[quantization]

    def weight(name: str, **options: Any) -> np.ndarray | tuple[np.ndarray, str]:
        tensor = load(name, **options)
        if tensor.ndim != 2 or tensor.shape[1] % _GROUP:
            return tensor
        is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
        format = tables if is_table else projections
        return to_blocks(tensor, format), format

    return weight


def to_blocks(weight: np.ndarray, format: str) -> np.ndarray:
    """uint8 [N, bytes of a row] of a weight [N, K], K in whole groups of 32.

    q8_0: scale = largest magnitude / 127. q4_1: minimum and scale span the group in 15 steps. Both
    are rounded to float16 before elements are divided by them, ties go to even. A group that is not
    finite, or too large for float16, gets a scale that the decoder refuses.
    """
    groups = np.asarray(weight, dtype=np.float32).reshape(weight.shape[0], -1, _GROUP)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if format == "q8_0":
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


def _steps(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Whole steps of `scale` in `values`; 0 where it is 0."""
    scale = scale.astype(np.float32)
    steps: np.ndarray = np.nan_to_num(np.rint(np.where(scale == 0, 0, values / scale)))
    return steps
