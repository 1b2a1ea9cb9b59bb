"""Packed weights as matrices, rows of x as e4m3 numbers: what products of other libraries take."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cuda_calls import Target, checked, fast
from linear_cases import both_families, same
from ops_arguments import refused
from packed_cases import FORMATS, PackedLayer, dequantised, make_packed, pack, random_blocks

from specdec_ext import ops

HALVES = [torch.bfloat16, torch.float16]
# Columns and k: whole tiles and cut ones, more than a block's four tiles of k.
SIZES = [(32, 64), (40, 96), (8, 32), (100, 320), (130, 544), (65, 1056)]
E4M3 = ("f8_g", "f8_a8")
formats = pytest.mark.parametrize("format", (*FORMATS, "f8_a8"))


def unpacked(
    target: Target, weight: ops.PackedWeight, dtype: torch.dtype, first: int, count: int
) -> torch.Tensor:
    """Rows of a weight, from the middle of poisoned memory."""
    k = weight.shape[1]
    poison = 0x7F if dtype == torch.uint8 else math.nan
    memory = target.put(torch.full(((count + 2) * k,), poison, dtype=dtype))
    out = memory[k:-k].view(count, k)
    result = ops.unpack_weight(weight, out=out, first=first, backend=target.backend)
    assert result is out
    around = torch.cat([memory[:k], memory[-k:]]).cpu()
    assert same(around, torch.full((2 * k,), poison, dtype=dtype))
    return out.cpu()


@pytest.mark.parametrize("size", SIZES, ids=str)
@formats
@checked
def test_elements_are_the_weight_s(target: Target, format: str, size: tuple[int, int]) -> None:
    """Bit for bit what the format's definition says, rounded once; but for the sign of zero."""
    dtype = HALVES[sum(size) % 2]
    layer = make_packed(1, *size, dtype, format)
    expected = torch.from_numpy(dequantised(layer.blocks, format)).to(dtype)
    weight = pack(target, layer)
    # A zero's sign is the sum's that widens it.
    assert same(unpacked(target, weight, dtype, 0, size[0]) + 0.0, expected + 0.0)


@pytest.mark.parametrize("dtype", [*HALVES, torch.uint8])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (32, 33), (64, 66), (96, 34), (128, 2)])
@checked
def test_some_rows(target: Target, first: int, count: int, dtype: torch.dtype) -> None:
    layer = make_packed(1, 130, 320, torch.bfloat16, "f8_a8")
    weight = pack(target, layer)
    whole = unpacked(target, weight, dtype, 0, 130)
    assert same(unpacked(target, weight, dtype, first, count), whole[first : first + count])


@pytest.mark.parametrize("size", [(32, 64), (40, 128), (100, 320), (65, 1088)], ids=str)
@pytest.mark.parametrize("format", E4M3)
@checked
def test_numbers_of_e4m3_are_the_file_s(target: Target, format: str, size: tuple[int, int]) -> None:
    blocks = random_blocks(*size, format)
    layer = PackedLayer(torch.empty(0), blocks, format, None)
    expected = torch.from_numpy(blocks).view(size[0], -1, 68)[..., 4:].reshape(size)
    assert same(unpacked(target, pack(target, layer), torch.uint8, 0, size[0]), expected)


def nearest_e4m3(value: float) -> int:
    """The code of the number that is nearest, the even one of two, by looking at all."""
    if math.isnan(value):
        return 127
    sizes = [
        (c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)
    ]
    code = min(range(127), key=lambda c: (abs(sizes[c] - abs(value)), c & 1))
    return code | (128 if value < 0 and code > 0 else 0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "depth", "apart"), [(3, 16, 0), (5, 320, 64), (2, 4112, 8)])
@checked
def test_rows_in_e4m3(
    target: Target, rows: int, depth: int, apart: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    wide = torch.full((rows, depth + apart), math.nan)
    wide[:, :depth] = torch.randn(rows, depth, generator=generator) * 3
    wide[0, ::3] *= 1e-4
    x = target.put(wide.to(dtype))[:, :depth]
    numbers = target.put(torch.full((rows + 1, depth), 0x55, dtype=torch.uint8))
    scales = target.put(torch.full((rows + 1,), -7.0))
    ops.e4m3_rows(x, numbers=numbers[:rows], scales=scales[:rows], backend=target.backend)
    assert bool((numbers[rows] == 0x55).all()) and float(scales[rows]) == -7.0
    for row, mine in enumerate(x.float().cpu().numpy()):
        scale = np.float32(np.abs(mine).max()) / np.float32(448)
        assert float(scales[row]) == float(scale)
        expected = [nearest_e4m3(float(value)) for value in mine / scale]
        assert numbers[row].tolist() == expected


@pytest.mark.parametrize("dtype", HALVES)
@checked
def test_rows_that_are_no_numbers_and_rows_of_zeros(target: Target, dtype: torch.dtype) -> None:
    x = torch.ones(5, 64, dtype=dtype)
    x[0] = 0
    x[1, 9] = math.nan
    x[2, 63] = -math.inf
    x[3] = torch.finfo(dtype).max
    numbers = target.put(torch.zeros(5, 64, dtype=torch.uint8))
    scales = target.put(torch.zeros(5))
    ops.e4m3_rows(target.put(x), numbers=numbers, scales=scales, backend=target.backend)
    values = numbers.cpu().view(torch.float8_e4m3fn).float()
    assert not values[0].any() and float(scales[0]) == 2.0**-100
    assert bool(scales[1].isnan()) and not math.isfinite(float(scales[2]))
    for row in (1, 2):
        assert bool((values[row] * scales[row].cpu()).isnan().any())
    assert bool((values[3] == 448).all())
    assert bool((values[4] == 448).all()) and float(scales[4]) == np.float32(1) / np.float32(448)


@both_families
@checked
def test_a_weight_is_read_behind_the_kernel_that_writes_it(target: Target) -> None:
    """And what is unpacked again into the same memory behind who reads that."""
    layer = make_packed(4, 64, 64, torch.bfloat16, "q8_0", bias=False)
    weight = pack(target, layer)
    out = target.put(torch.empty(64, 64, dtype=torch.bfloat16))
    result = target.put(torch.empty(4, 64, dtype=torch.bfloat16))
    x = target.put(layer.x)
    for _ in range(2):
        ops.unpack_weight(weight, out=out, backend=target.backend)
        ops.linear(x, out, out=result, backend=target.backend)
    plain = target.put(torch.empty(4, 64, dtype=torch.bfloat16))
    ops.linear(x, weight, out=plain, backend=target.backend)
    assert same(result.cpu(), plain.cpu())


@pytest.mark.parametrize("format", E4M3)
def test_row_scales(format: str) -> None:
    blocks = random_blocks(5, 128, format)
    each = torch.from_numpy(blocks).view(5, 2, 68)
    assert ops.pack_weight(torch.from_numpy(blocks), format).row_scales is None
    each[:, 1, :4] = each[:, 0, :4]
    scales = ops.pack_weight(torch.from_numpy(blocks), format).row_scales
    assert scales is not None
    assert torch.equal(scales, each[:, 0, :4].contiguous().view(torch.float32)[:, 0])
    other = random_blocks(5, 128, "q8_0")
    assert ops.pack_weight(torch.from_numpy(other), "q8_0").row_scales is None


@fast
def test_bad_arguments(target: Target) -> None:
    weight = pack(target, make_packed(1, 64, 128, torch.bfloat16, "q4_0"))

    def unpack(out: torch.Tensor, **how: int) -> None:
        ops.unpack_weight(weight, out=target.put(out), backend=target.backend, **how)

    whole = torch.zeros(64, 128, dtype=torch.bfloat16)
    refused(ValueError, "out has shape [64, 64]: expected [n, K] = [any, 128]",
            lambda: unpack(whole[:, :64].contiguous()))  # fmt: skip
    refused(ValueError, "first = 16 and 32 rows of out: give a multiple of 32 and at most the "
            "weight's 64 rows", lambda: unpack(whole[:32], first=16))  # fmt: skip
    refused(ValueError, "first = 32 and 64 rows of out", lambda: unpack(whole, first=32))
    refused(ValueError, "first = -32", lambda: unpack(whole[:32], first=-32))
    refused(TypeError, "out has dtype uint8", lambda: unpack(whole.to(torch.uint8)))
    refused(TypeError, "out has dtype float32", lambda: unpack(whole.float()))
    memory = torch.zeros(64 * 128 + 4, dtype=torch.bfloat16)
    refused(ValueError, "out does not begin at a multiple of 16 bytes",
            lambda: unpack(memory[4:].view(64, 128)))  # fmt: skip

    def narrow(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        ops.e4m3_rows(target.put(x), numbers=target.put(numbers), scales=target.put(scales),
                      backend=target.backend)  # fmt: skip

    x, numbers, scales = whole[:4, :32].contiguous(), torch.zeros(4, 32).byte(), torch.zeros(4)
    cut, cut_numbers = x[:, :24].contiguous(), numbers[:, :24].contiguous()
    refused(ValueError, "x has 24 columns: give a multiple of 16",
            lambda: narrow(cut, cut_numbers, scales))  # fmt: skip
    refused(TypeError, "x has dtype float32", lambda: narrow(x.float(), numbers, scales))
    refused(TypeError, "numbers has dtype int8", lambda: narrow(x, numbers.to(torch.int8), scales))
    refused(ValueError, "scales has shape [3]", lambda: narrow(x, numbers, scales[:3]))
    refused(ValueError, "x has rows that do not begin at multiples of 16 bytes",
            lambda: narrow(whole[:4, 4:36], numbers, scales))  # fmt: skip
