"""Weights of 8 and 4 bits in the order in which the linear layer of a device reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .weight_blocks import BLOCK_SIZES, E4M3_FORMATS, take_apart

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PACKED_FORMATS = tuple(BLOCK_SIZES)
# Columns and k of a tile (cpp/backend/packed_weight.h).
_COLUMNS, _DEPTH = 32, 64
# Scales of e4m3 are multiplied by 256 in float32.
_SCALE_BITS = 120
# Rows that are packed at once.
_PART = 1 << 12


@dataclass(frozen=True)
class _Layout:
    """Bits of a number, what stands for zero, k of a scale; is_wide: factors are float32."""

    bits: int
    zero: int
    group: int
    is_wide: bool
    has_minimum: bool


_LAYOUTS = {
    "q8_0": _Layout(8, 128, 32, False, False),
    "q4_0": _Layout(4, 8, 32, False, False),
    "q4_1": _Layout(4, 0, 32, False, True),
    "q4_g": _Layout(4, 0, 64, True, True),
    "q4_k": _Layout(4, 0, 32, True, True),
    "q8_g": _Layout(8, 128, 64, True, False),
    "q5_k": _Layout(8, 0, 32, True, True),
    "q6_k": _Layout(8, 128, 16, True, False),
    "f8_g": _Layout(8, 0, 64, True, False),
    "f8_a8": _Layout(8, 0, 64, True, False),
}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] for ``linear``, made by ``pack_weight``.

    data    uint8 [bytes], on the device
    format  format of its elements: that of the blocks, or a wider one that holds them exactly
    shape   (N, K)
    row_scales
            float32 [N], of e4m3 weights whose rows have one scale each; None: of all others
    """

    data: Tensor
    format: str
    shape: tuple[int, int]
    row_scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return int(self.data.numel())

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The elements [n, K] of these rows, as ``linear`` reads them for an x of ``dtype``.

        ids  int [n], on the device
        """
        import torch

        layout = _LAYOUTS[self.format]
        bits = layout.bits
        n, k = self.shape
        ids = ids.long()
        tiles = self.data.view(-(-n // _COLUMNS), -(-k // _DEPTH), -1)[ids // _COLUMNS]
        # Where a tile has the numbers of each of its columns, in order of k.
        order = torch.arange(_COLUMNS * _DEPTH, dtype=torch.int32, device=ids.device)
        places = torch.empty_like(order)
        places[_in_order_of_products(order.view(_COLUMNS, _DEPTH), bits).flatten().long()] = order
        at = (
            places.view(_COLUMNS, _DEPTH)[ids % _COLUMNS]
            .long()[:, None]
            .expand(-1, tiles.shape[1], -1)
        )
        halves = at * bits // 4
        numbers = tiles.gather(2, halves // 2)
        if bits == 4:
            numbers = numbers >> (halves % 2 * 4).byte() & 15
        if self.format in E4M3_FORMATS:
            values = numbers.view(torch.float8_e4m3fn).float()
        else:
            values = (numbers.int() - layout.zero).float()
        codes = _COLUMNS * _DEPTH * bits // 8
        factors = tiles[..., codes:].view(torch.float32 if layout.is_wide else torch.float16)
        groups = _DEPTH // layout.group
        factors = factors.view(len(ids), tiles.shape[1], -1, groups, 8, 4)
        column = ids % _COLUMNS
        one = torch.arange(len(ids), device=ids.device)
        # [n, K / 64, scale or minimum, k of a tile]
        factors = factors[one, :, :, :, column % 8, column // 8].float()
        factors = factors.repeat_interleave(layout.group, dim=-1)
        values = values * factors[:, :, 0]
        if layout.has_minimum:
            values += factors[:, :, 1]
        return values.flatten(1)[:, :k].to(dtype)


def pack_weight(blocks: Tensor, format: str) -> PackedWeight:
    """Blocks of a file in the order in which devices read them, without loss.

    Shapes   blocks uint8 [N, bytes of a row], on the device that will use them: of a GGUF file, or
             those that quantised checkpoints become (docs/kernels/quant_linear.md).
    Returns  the weight [N, K] on the same device, N rounded up to 32 and K to 64. Bits an element:
             q8_0 8.5, q4_0 4.5, q4_1 5, q4_k 6, q5_k and q6_k 10, f8_g and f8_a8 8.5. q5_0 becomes
             q8_0 and q5_1 q5_k. q4_g has 5
             and q8_g 8.5 where a scale serves 64 k; q4_g else becomes q4_k, q8_g q6_k. q4_g with a
             scale of more than 20 bits becomes q5_k, whose kernel rounds products before it adds
             minimums.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    import torch

    if format not in BLOCK_SIZES:
        known = ", ".join(PACKED_FORMATS)
        raise ValueError(
            f"format = {format!r}: a device has kernels for {known}; dequantise others"
        )
    elements, size = BLOCK_SIZES[format]
    if blocks.dtype != torch.uint8:
        raise TypeError(f"blocks has dtype {blocks.dtype}: expected uint8")
    if blocks.ndim != 2 or not blocks.numel() or blocks.shape[1] % size:
        raise ValueError(
            f"blocks has shape {list(blocks.shape)}: expected [N, bytes], rows of whole blocks of "
            f"{size} bytes ({format})"
        )
    n, k = blocks.shape[0], blocks.shape[1] // size * elements
    kept = _kept_as(blocks, format)
    parts = [_tiles(blocks[first : first + _PART], format, kept) for first in range(0, n, _PART)]
    return PackedWeight(torch.cat(parts), kept, (n, k), _row_scales(blocks, format))


def _e4m3_scales(blocks: Tensor) -> Tensor:
    """float32 [N, blocks of a row] of blocks [N, blocks of a row, bytes]."""
    import torch

    return blocks[..., :4].contiguous().view(torch.float32)[..., 0]


def _row_scales(blocks: Tensor, format: str) -> Tensor | None:
    """float32 [N], if e4m3 numbers have one scale for each row."""
    if format not in E4M3_FORMATS:
        return None
    scales = _e4m3_scales(blocks.reshape(len(blocks), -1, BLOCK_SIZES[format][1]))
    return scales[:, 0].clone() if bool((scales == scales[:, :1]).all()) else None


def _kept_as(blocks: Tensor, format: str) -> str:
    """The layout that holds what these blocks say."""
    import torch

    blocks = blocks.reshape(len(blocks), -1, BLOCK_SIZES[format][1])
    if format in E4M3_FORMATS:
        nans = int((blocks[..., 4:] & 127 == 127).sum())
        if nans:
            raise ValueError(f"blocks holds {nans} e4m3 codes of NaN: give numbers")
        scales = _e4m3_scales(blocks)
        if bool((scales.abs() >= 2.0**_SCALE_BITS).any()):
            raise ValueError(
                f"blocks holds a scale of {float(scales.abs().max()):.3g}: e4m3 takes scales below "
                f"2^{_SCALE_BITS}"
            )
    if format in ("q5_0", "q5_1"):
        return {"q5_0": "q8_0", "q5_1": "q5_k"}[format]
    if format not in ("q4_g", "q8_g"):
        return format
    heads = blocks[..., : 8 if format == "q4_g" else 4]
    if format == "q4_g":
        scales = heads[..., :4].contiguous().view(torch.int32)
        if bool((scales & 15).any()):
            return "q5_k"
    is_spread = heads.shape[1] % 2 == 0 and torch.equal(heads[:, ::2], heads[:, 1::2])
    return format if is_spread else {"q4_g": "q4_k", "q8_g": "q6_k"}[format]


def _tiles(blocks: Tensor, format: str, kept: str) -> Tensor:
    """uint8 [bytes]: the tiles of some rows."""
    import torch

    layout = _LAYOUTS[kept]
    numbers, factors = take_apart(blocks, format)
    n, k = numbers.shape
    columns, depth = math.ceil(n / _COLUMNS) * _COLUMNS, math.ceil(k / _DEPTH) * _DEPTH
    # Zeros outside of the matrix, scales above all.
    whole = numbers.new_zeros(columns, depth)
    whole[:n, :k] = numbers
    codes = whole.view(columns // _COLUMNS, _COLUMNS, depth // _DEPTH, _DEPTH)
    codes = _in_order_of_products(codes.transpose(1, 2), layout.bits)
    if layout.bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    parts = [codes]
    for factor in factors:
        count = k // layout.group
        own = factor.shape[1]
        factor = factor[:, :: own // count] if own > count else factor
        spread = factor.new_zeros(columns, depth // layout.group)
        spread[:n, :count] = factor.repeat_interleave(count // factor.shape[1], dim=1)
        # Axes [tile, column / 8, column % 8, k tile, group].
        split = spread.view(columns // _COLUMNS, 4, 8, depth // _DEPTH, -1)
        parts.append(split.permute(0, 3, 4, 2, 1).flatten(2).contiguous().view(torch.uint8))
    return torch.cat(parts, -1).flatten()


def _in_order_of_products(tiles: Tensor, bits: int) -> Tensor:
    """[..., 2048] of [..., 32 columns, 64 k]: the lanes' elements as the operand of m16n8k16."""
    steps = 16 // bits  # of 16 k, in a lane's 16 bytes
    # column: fragment, half, row of the half; k: vector, step, half, lane, element.
    shape = tiles.shape[:-2]
    split = tiles.reshape(*shape, 2, 2, 8, 4 // steps, steps, 2, 4, 2)
    m, h, g, v, s, kh, t, e = range(len(shape), len(shape) + 8)
    return split.permute(*range(len(shape)), m, v, g, t, s, kh, h, e).flatten(len(shape))
