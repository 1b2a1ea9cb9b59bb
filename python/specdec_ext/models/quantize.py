"""Weights of a float checkpoint rounded to blocks while they are loaded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

__all__ = ["QUANTIZATIONS", "quantized_loader", "to_blocks"]

# LLM(quantization=...): the format of projections, and of the embeddings and the head, which every
# token passes and which few bits hurt most.
QUANTIZATIONS = {"int8": ("q8_0", "q8_0"), "int4": ("q4_1", "q8_0")}
_GROUP = 32


def quantized_loader(
    load: Callable[[str], torch.Tensor], quantization: str
) -> Callable[[str], torch.Tensor | tuple[np.ndarray, str]]:
    """`load` with matrices in blocks; vectors, and rows that are no whole blocks, stay."""
    projections, tables = QUANTIZATIONS[quantization]

    def weight(name: str) -> torch.Tensor | tuple[np.ndarray, str]:
        tensor = load(name)
        if tensor.dim() != 2 or tensor.shape[1] % _GROUP:
            return tensor
        is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
        format = tables if is_table else projections
        return to_blocks(tensor, format), format

    return weight


def to_blocks(weight: torch.Tensor, format: str) -> np.ndarray:
    """uint8 [N, bytes of a row] of a weight [N, K], K in whole groups of 32.

    q8_0: scale = largest magnitude / 127. q4_1: minimum and scale span the group in 15 steps. Both
    are rounded to float16 before elements are divided by them, ties go to even. A group that is not
    finite, or too large for float16, gets a scale that the decoder refuses.
    """
    groups = weight.float().reshape(weight.shape[0], -1, _GROUP)
    if format == "q8_0":
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
        codes = _steps(groups, scale).clamp(-127, 127).to(torch.int8)
        parts = [scale.view(torch.uint8), codes.view(torch.uint8)]
    else:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale, minimum = ((high - low) / 15).half(), low.half()
        codes = _steps(groups - minimum.float(), scale).clamp(0, 15).to(torch.uint8)
        parts = [scale.view(torch.uint8), minimum.view(torch.uint8)]
        parts.append(codes[..., :16] | codes[..., 16:] << 4)
    blocks: np.ndarray = torch.cat(parts, -1).reshape(weight.shape[0], -1).numpy()
    return blocks


def _steps(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Whole steps of `scale` in `values`; 0 where it is 0."""
    scale = scale.float()
    return torch.where(scale == 0, 0.0, values / scale).round().nan_to_num()
