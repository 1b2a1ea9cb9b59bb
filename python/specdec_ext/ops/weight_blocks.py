"""Weights in blocks of a file, taken apart on the device that holds them: numbers and factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BLOCK_SIZES", "E4M3_FORMATS", "take_apart"]

# Elements and bytes of a block.
BLOCK_SIZES = {
    "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q4_g": (32, 24), "q8_g": (32, 36),
    "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "q5_0": (32, 22),
    "q5_1": (32, 24), "f8_g": (64, 68), "f8_a8": (64, 68),
}  # fmt: skip
E4M3_FORMATS = ("f8_g", "f8_a8")  # numbers are e4m3; of f8_a8 those of x, too
# Blocks of a scale, perhaps a minimum, and numbers.
_HAS_MINIMUM = ("q4_1", "q4_g")
_WIDE = ("q4_g", "q8_g", *E4M3_FORMATS)


def take_apart(blocks: Tensor, format: str) -> tuple[Tensor, list[Tensor]]:
    """Numbers uint8 [n, K] and factors: the scales, then the minimums of a format that has them,
    [n, groups of a row], float16 in q8_0, q4_0, q4_1 and q5_0, float32 in the others.

    blocks   uint8 [n, bytes of a row] in a format of BLOCK_SIZES
    Numbers  0..15 or 0..31 as they are; signed ones plus 128; e4m3 codes
    """
    import torch

    n = len(blocks)
    blocks = blocks.reshape(n, -1, BLOCK_SIZES[format][1])
    if format == "q6_k":
        return _six_bits(blocks)
    if format in ("q5_0", "q5_1"):
        return _fifth_bits(blocks, 1 if format == "q5_0" else 2)
    if format in ("q4_k", "q5_k"):
        return _five_bits(blocks) if format == "q5_k" else _four_bits(blocks)
    dtype = torch.float32 if format in _WIDE else torch.float16
    count = 2 if format in _HAS_MINIMUM else 1
    head = count * dtype.itemsize
    factors = blocks[..., :head].contiguous().view(dtype)
    numbers = blocks[..., head:]
    if format in ("q4_0", "q4_1", "q4_g"):
        numbers = torch.cat([numbers & 15, numbers >> 4], -1)
    elif format not in E4M3_FORMATS:
        numbers = numbers ^ 128
    return numbers.reshape(n, -1), [factors[..., i] for i in range(count)]


def _fifth_bits(blocks: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
    """The numbers of q5_1, with `count` 2 factors, as q5_k has them; those of q5_0, u - 16 + 128,
    as q8_0's."""
    import torch

    factors = blocks[..., : 2 * count].contiguous().view(torch.float16)
    fifth, nibbles = blocks[..., 2 * count : 2 * count + 4], blocks[..., 2 * count + 4 :]
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (fifth.unsqueeze(-1) >> places & 1).flatten(-2) << 4
    numbers = torch.cat([nibbles & 15, nibbles >> 4], -1) | high
    if count == 1:
        return (numbers + 112).reshape(len(blocks), -1), [factors[..., 0]]
    return numbers.reshape(len(blocks), -1), [factors[..., i].float() for i in range(2)]


def _half(blocks: Tensor, first: int) -> Tensor:
    """float32 [n, blocks, 1] of the float16 at these bytes."""
    import torch

    return blocks[..., first : first + 2].contiguous().view(torch.float16).float()


def _factors_of_eight(blocks: Tensor) -> list[Tensor]:
    """Scales and minimums of 32, numbers of 6 bits times two of the block; in float32 exact."""
    import torch

    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    minimums = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    factors = [_half(blocks, 0) * scales.float(), -(_half(blocks, 2) * minimums.float())]
    return [factor.flatten(1) for factor in factors]


def _nibbles(words: Tensor) -> Tensor:
    """[n, blocks, 8, 32] of bytes [n, blocks, 128]: 32 low halves, then the same bytes' high."""
    import torch

    words = words.reshape(*words.shape[:2], 4, 32)
    return torch.stack([words & 15, words >> 4], -2).flatten(2, 3)


def _four_bits(blocks: Tensor) -> tuple[Tensor, list[Tensor]]:
    return _nibbles(blocks[..., 16:]).flatten(1), _factors_of_eight(blocks)


def _five_bits(blocks: Tensor) -> tuple[Tensor, list[Tensor]]:
    import torch

    fifth = torch.stack([blocks[..., 16:48] >> i & 1 for i in range(8)], -2)
    numbers = _nibbles(blocks[..., 48:]) | fifth << 4
    return numbers.flatten(1), _factors_of_eight(blocks)


def _six_bits(blocks: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Each half of a block is four times 32 numbers of 4 low bits and 2 high ones, less 32."""
    import torch

    shape = blocks.shape[:2]
    low, high = (
        blocks[..., :128].reshape(*shape, 2, 64),
        blocks[..., 128:192].reshape(*shape, 2, 32),
    )
    low = torch.cat([low & 15, low >> 4], -1).reshape(*shape, 2, 4, 32)
    high = torch.stack([high >> 2 * i & 3 for i in range(4)], -2)
    numbers = (low | high << 4) + (128 - 32)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return numbers.flatten(1), [scales.flatten(1)]
