"""Weights of 8 and 4 bits in the order in which the linear layer of a device reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Columns and k of a tile, elements of a scale (cpp/backend/packed_weight.h).
_COLUMNS, _DEPTH, _GROUP = 32, 64, 32
# By format: bits of a number, what stands for zero, bytes of a block, is there a minimum?
_FORMATS = {"q8_0": (8, 128, 34, False), "q4_0": (4, 8, 18, False), "q4_1": (4, 0, 20, True)}
PACKED_FORMATS = tuple(_FORMATS)
# Rows that are packed at once.
_PART = 1 << 12


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] for ``linear``, made by ``pack_weight``.

    data    uint8 [bytes], on the device
    format  "q8_0", "q4_0" or "q4_1": what its elements stand for
    shape   (N, K)
    """

    data: Tensor
    format: str
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return int(self.data.numel())

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The elements [n, K] of these rows (ids int [n], on the device), as the products of a call
        in ``dtype`` take them."""
        import torch

        bits, zero, _, has_minimum = _FORMATS[self.format]
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
        numbers = tiles.gather(2, halves // 2).int()
        if bits == 4:
            numbers = numbers >> (halves % 2 * 4) & 15
        codes = _COLUMNS * _DEPTH * bits // 8
        factors = tiles[..., codes:].view(torch.float16).view(len(ids), tiles.shape[1], -1, 8, 4, 2)
        column = ids % _COLUMNS
        one = torch.arange(len(ids), device=ids.device)
        factors = factors[one, :, :, column % 8, column // 8].float()  # [n, K / 64, 1 or 2, 2]
        factors = factors.repeat_interleave(_GROUP, dim=-1)
        values = (numbers - zero).float() * factors[:, :, 0]
        if has_minimum:
            values += factors[:, :, 1]
        return values.flatten(1)[:, :k].to(dtype)


def pack_weight(blocks: Tensor, format: str) -> PackedWeight:
    """Blocks of a GGUF file in the order in which devices read them, without loss.

    Shapes   blocks uint8 [N, bytes of a row], on the device that will use them: groups of 32 k,
             each a float16 scale, with q4_1 a float16 minimum, and 32 (q8_0) or 16 bytes.
    Returns  the weight [N, K] on the same device: 8.5, 4.5 or 5 bits an element, N rounded up to 32
             and K to 64.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    import torch

    if format not in _FORMATS:
        known = ", ".join(PACKED_FORMATS)
        raise ValueError(
            f"format = {format!r}: a device has kernels for {known}; dequantise others"
        )
    size = _FORMATS[format][2]
    if blocks.dtype != torch.uint8:
        raise TypeError(f"blocks has dtype {blocks.dtype}: expected uint8")
    if blocks.ndim != 2 or not blocks.numel() or blocks.shape[1] % size:
        raise ValueError(
            f"blocks has shape {list(blocks.shape)}: expected [N, bytes], rows of whole blocks of "
            f"{size} bytes ({format})"
        )
    n, k = blocks.shape[0], blocks.shape[1] // size * _GROUP
    parts = [_tiles(blocks[first : first + _PART], format) for first in range(0, n, _PART)]
    return PackedWeight(torch.cat(parts), format, (n, k))


def _tiles(blocks: Tensor, format: str) -> Tensor:
    """uint8 [bytes]: the tiles of some rows."""
    import torch

    bits, _, size, has_minimum = _FORMATS[format]
    n = len(blocks)
    blocks = blocks.reshape(n, -1, size)
    head = 4 if has_minimum else 2
    numbers = blocks[..., head:]
    # Half bytes, or two's complement to 0..255.
    numbers = torch.cat([numbers & 15, numbers >> 4], -1) if bits == 4 else numbers ^ 128
    columns, groups = math.ceil(n / _COLUMNS) * _COLUMNS, math.ceil(blocks.shape[1] / 2) * 2
    # Zeros outside of the matrix, scales above all.
    whole = numbers.new_zeros(columns, groups, _GROUP)
    whole[:n, : blocks.shape[1]] = numbers
    codes = whole.view(columns // _COLUMNS, _COLUMNS, groups // 2, _DEPTH)
    codes = _in_order_of_products(codes.transpose(1, 2), bits)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    factors = blocks.new_zeros(columns, groups, head)
    factors[:n, : blocks.shape[1]] = blocks[..., :head]
    # Axes [tile, column / 8, column % 8, k tile, group, factor, byte].
    spread = factors.view(columns // _COLUMNS, 4, 8, groups // 2, 2, head // 2, 2)
    scales = spread.permute(0, 3, 5, 2, 1, 4, 6).flatten(2)
    return torch.cat([codes, scales], -1).flatten()


def _in_order_of_products(tiles: Tensor, bits: int) -> Tensor:
    """[..., 2048] of [..., 32 columns, 64 k]: the lanes' elements as the operand of m16n8k16."""
    steps = 16 // bits  # of 16 k, in a lane's 16 bytes
    # column: fragment, half, row of the half; k: vector, step, half, lane, element.
    shape = tiles.shape[:-2]
    split = tiles.reshape(*shape, 2, 2, 8, 4 // steps, steps, 2, 4, 2)
    m, h, g, v, s, kh, t, e = range(len(shape), len(shape) + 8)
    return split.permute(*range(len(shape)), m, v, g, t, s, kh, h, e).flatten(len(shape))
