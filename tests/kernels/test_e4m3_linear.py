"""Products of e4m3 weights whose inputs are rounded to e4m3, too (f8_a8): on devices of 9.0 by the
tensor cores' own e4m3, elsewhere as f8_g of the rounded rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from cuda_calls import Target, checked, emulated_device, every_backend, fast
from linear_cases import both_families, needs_emulation, same
from packed_cases import PackedLayer, dequantised, make_packed, pack, random_blocks, run_packed

from specdec_ext import ops

HALVES = [torch.bfloat16, torch.float16]
SHAPES = [
    (1, 8, 64), (3, 40, 128), (8, 32, 320), (9, 33, 192), (17, 128, 64), (32, 130, 256),
    (33, 129, 640), (64, 64, 576), (65, 140, 192), (90, 300, 448), (128, 127, 128), (130, 40, 320),
    (5, 31, 4160), (20, 24, 8256),
]  # fmt: skip


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as e4m3 numbers, by torch's conversion, and their scales [R, 1]; float32."""
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    scale = (largest / 448).clamp(min=2.0**-100)
    scale[~torch.isfinite(largest)] = math.nan
    return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scale


def of_whole_powers(x: torch.Tensor) -> torch.Tensor:
    """Rows whose scale is a power of two: what is multiplied by it keeps its mantissa."""
    x = x.clone()
    exponent = torch.floor(torch.log2(x.float().abs().amax(1)))
    x[:, 3] = (1.75 * 2.0 ** (exponent + 1)).to(x.dtype)
    return x


def make_layer(rows: int, columns: int, depth: int, dtype: torch.dtype, **how: bool) -> PackedLayer:
    return make_packed(rows, columns, depth, dtype, "f8_a8", **how)


def check_error(layer: PackedLayer, result: torch.Tensor) -> None:
    """At most twice the error of torch in the same dtype, and what sums of few bits differ by."""
    numbers, scale = rounded(layer.x)
    weight = torch.from_numpy(dequantised(layer.blocks, "f8_g"))
    bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.float()
    exact = numbers.double() @ weight.double().t() * scale + bias
    size = numbers.double().abs() @ weight.double().abs().t() * scale + bias.abs()
    dtype = layer.x.dtype
    theirs = torch.nn.functional.linear(
        (numbers * scale).to(dtype), weight.to(dtype), bias.to(dtype)
    )
    error = (result.double() - exact).abs()
    allowed = 2 * (theirs.double() - exact).abs().amax() + size * 2.0**-12
    assert bool((error <= allowed).all()), float((error - allowed).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@both_families
@every_backend
def test_values(target: Target, shape: tuple[int, int, int]) -> None:
    layer = make_layer(*shape, HALVES[sum(shape) % 2], bias=shape[0] % 3 > 0)
    result = run_packed(target, layer)
    check_error(layer, result)
    assert same(run_packed(target, layer, out_shift=3, aside=False), result)


@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
@checked
def test_exact_sums_of_the_tensor_cores(target: Target, shape: tuple[int, int, int]) -> None:
    """Small whole numbers: there is nothing to round until the result is stored."""
    rows, columns, depth = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randint(-8, 9, (rows, depth), generator=generator).to(torch.bfloat16)
    x[:, 5] = 448  # the scale is 1
    numbers = torch.randint(-8, 9, (columns, depth), generator=generator)
    numbers[:, 5] = 0
    codes = numbers.float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    powers = 2.0 ** torch.randint(-3, 4, (columns, depth // 64, 1), generator=generator)
    scales = powers.float().numpy()
    blocks = np.concatenate([scales.view(np.uint8), codes.reshape(columns, -1, 64)], -1)
    layer = PackedLayer(x, blocks.reshape(columns, -1), "f8_a8", None)
    weight = (numbers.view(columns, -1, 64) * powers).view(columns, depth).double()
    expected = (x.double() @ weight.t()).to(torch.bfloat16)
    for sms in (4, 132):
        with emulated_device(sms):
            assert same(run_packed(target, layer) + 0.0, expected + 0.0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [3, 40, 100])
@both_families
@checked
def test_every_element_of_x_meets_its_own(target: Target, rows: int, dtype: torch.dtype) -> None:
    """The weight is the identity: the result is the rounded x, and shows where each k went."""
    depth = 192
    codes = np.zeros((depth, depth), np.uint8)
    np.fill_diagonal(codes, 0x38)
    ones = np.ones((depth, depth // 64, 1), np.float32).view(np.uint8)
    blocks = np.concatenate([ones, codes.reshape(depth, -1, 64)], -1).reshape(depth, -1)
    x = make_layer(rows, 8, depth, dtype).x
    x[0] = torch.linspace(-3, 5, depth)
    result = run_packed(target, PackedLayer(x, blocks, "f8_a8", None))
    numbers, scale = rounded(x)
    assert same(result + 0.0, (numbers * scale).to(dtype) + 0.0)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] in (1, 9, 33, 65, 5)], ids=str)
@every_backend
def test_elsewhere_it_is_f8_g_of_the_rounded_rows(
    target: Target, shape: tuple[int, int, int]
) -> None:
    needs_emulation(target, 8)
    with emulated_device(4, major=8):
        layer = make_layer(*shape, torch.bfloat16, bias=False)
        layer = dataclasses.replace(layer, x=of_whole_powers(layer.x))
        numbers, scale = rounded(layer.x)
        own = dataclasses.replace(layer, x=numbers.to(layer.x.dtype), format="f8_g")
        expected = run_packed(target, own).float() * scale
        assert same(run_packed(target, layer), expected.to(layer.x.dtype))


@both_families
@fast
def test_a_row_has_the_bits_it_has_alone(target: Target) -> None:
    """In calls of every number of rows."""
    layer = make_layer(130, 40, 320, torch.bfloat16)
    weight = pack(target, layer)
    alone = torch.cat([run_packed(target, layer.rows([r]), weight=weight) for r in range(130)])
    for count in range(1, 131):
        assert same(run_packed(target, layer.rows(slice(count)), weight=weight), alone[:count])


@pytest.mark.parametrize(("columns", "depth"), [(520, 320), (72, 3264)])
@fast
def test_one_row_and_the_same_among_84(target: Target, columns: int, depth: int) -> None:
    """Over every tile; with slices that are added."""
    layer = make_layer(130, columns, depth, torch.bfloat16)
    weight = pack(target, layer)
    expected = run_packed(target, layer.rows(slice(84)), weight=weight)
    for sms in (4, 132):
        with emulated_device(sms):
            for row in (0, 41, 83):
                alone = run_packed(target, layer.rows([row]), weight=weight)
                assert same(alone, expected[row : row + 1])
            for count in (8, 9, 32, 33, 64, 65, 96, 97, 128, 130):
                result = run_packed(target, layer.rows(slice(count)), weight=weight)
                assert same(result[:84], expected[:count])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [12, 70])
@both_families
@every_backend
def test_rows_of_every_size(target: Target, rows: int, dtype: torch.dtype) -> None:
    """Zeros, the largest and the least numbers, and such as are none, which spoil their own row."""
    layer = make_layer(rows, 40, 192, dtype, bias=False)
    x, most = layer.x.clone(), torch.finfo(dtype).max
    x[0] = 0
    x[1] = 0
    x[1, 7] = most
    x[2] *= 2.0**-20 / x[2].abs().max()
    x[3, 100] = math.nan
    x[4, 101] = math.inf
    x[5, 102] = -math.inf
    x[6] = torch.finfo(dtype).smallest_normal / 2  # subnormal
    layer = dataclasses.replace(layer, x=x)
    result = run_packed(target, layer)
    fine = [r for r in range(rows) if r not in (1, 3, 4, 5)]
    assert bool(result[3:6].isnan().all()) and not bool(result[fine].isnan().any())
    assert not bool(result[0].any())
    check_error(layer.rows(fine), result[fine])
    # Weights that are not subnormal in float16.
    weight = torch.from_numpy(dequantised(layer.blocks, "f8_g"))[:, 7].double()
    one, near = weight * most, (weight.abs() < 0.5) & (weight.abs() > 2.0**-14)
    assert int(near.sum()) > 20
    error = (result[1].double() - one).abs()[near]
    assert bool((error <= one.abs()[near] * 2.0**-7).all())


@pytest.mark.parametrize("rows", [12, 70])
@both_families
@checked
def test_less_scratch_takes_more_launches(target: Target, rows: int) -> None:
    layer = make_layer(rows, 37, 4160, torch.bfloat16)
    expected = run_packed(target, layer)
    x, weight = target.put(layer.x), pack(target, layer)
    assert layer.bias is not None
    bias = target.put(layer.bias)
    how = {"format": "f8_a8", "backend": target.backend}
    wanted = ops.linear_scratch_bytes(rows, 37, 4160, torch.bfloat16, **how)
    assert (
        wanted - rows * 2 * 4160
        > ops.linear_scratch_bytes(rows, 37, 4160, torch.bfloat16, backend=target.backend) // 2
    )
    for room in (wanted, wanted // 2, 12_000):  # the last one has room for one row, or two
        out = target.put(torch.full((rows, 37), math.nan, dtype=torch.bfloat16))
        scratch = target.put(torch.full((room // 4 + 64,), math.nan))
        ops.linear(x, weight, out=out, bias=bias, backend=target.backend, workspace=scratch)
        assert same(out.cpu(), expected)
    with pytest.raises(ValueError, match="workspace"):
        ops.linear(x, weight, out=target.put(torch.empty(rows, 37, dtype=torch.bfloat16)),
                   backend=target.backend, workspace=target.put(torch.empty(64)))  # fmt: skip


@pytest.mark.parametrize("room", [20_000, 40_000, 150_000, 152_000, 156_000, 164_000])
@both_families
@fast
def test_rounded_rows_leave_room_for_their_sums(target: Target, room: int) -> None:
    """17 rows of 8.3 KB fit into 150 KB beside the sums of one row alone. But as one of 17 a row is
    in another tile, whose sums are twice as large on 8.0."""
    layer = make_layer(20, 520, 4160, torch.bfloat16, bias=False)
    expected = run_packed(target, layer)
    x, weight = target.put(layer.x), pack(target, layer)
    out = target.put(torch.empty(20, 520, dtype=torch.bfloat16))
    scratch = target.put(torch.full((room // 4 + 64,), math.nan))
    how = {"out": out, "backend": target.backend, "workspace": scratch}
    if room < 25_000:
        with pytest.raises(ValueError, match="workspace has"):
            ops.linear(x, weight, **how)
    else:
        ops.linear(x, weight, **how)
        assert same(out.cpu(), expected)


@fast
def test_some_columns_are_cut_as_the_matrix_they_are_of(target: Target) -> None:
    layer = make_layer(5, 10304, 4160, torch.bfloat16, bias=False)
    x, out = target.put(layer.x), target.put(torch.zeros(5, 64, dtype=torch.bfloat16))
    expected = run_packed(target, layer)[:, 128:192]
    part = dataclasses.replace(layer, blocks=layer.blocks[128:192])
    ops.linear(x, pack(target, part), out=out, cut_columns=10304, backend=target.backend)
    assert same(out.cpu(), expected)


@pytest.mark.parametrize("rows", [3, 40])
@both_families
@checked
def test_x_is_read_behind_the_kernel_that_writes_it(target: Target, rows: int) -> None:
    layer = make_layer(rows, 40, 320, torch.bfloat16)
    x, weight = target.put(layer.x), pack(target, layer)
    scale = target.put(torch.ones(320, dtype=torch.bfloat16))
    out = target.put(torch.empty(rows, 40, dtype=torch.bfloat16))
    results = []
    for constant in (False, True):
        normed = torch.empty_like(x)
        ops.rms_norm(x, scale, out=normed, backend=target.backend)
        ops.linear(normed, weight, out=out, constant_weight=constant, backend=target.backend)
        results.append(out.clone())
    assert same(*results)


@checked
def test_what_lies_in_a_tile_past_the_last_column_does_not_matter(target: Target) -> None:
    """Whatever numbers and scales it has."""
    for rows in (3, 100):
        layer = make_layer(rows, 64, 128, torch.float16)
        expected = run_packed(target, layer)[:, :37]
        blocks = layer.blocks.copy()
        blocks[37:] = 0xF0
        whole = pack(target, dataclasses.replace(layer, blocks=blocks))
        weight = dataclasses.replace(whole, shape=(37, whole.shape[1]))
        assert layer.bias is not None
        cut = dataclasses.replace(layer, blocks=blocks[:37], bias=layer.bias[:37].clone())
        assert same(run_packed(target, cut, weight=weight), expected)


def test_packing_loses_nothing() -> None:
    blocks = random_blocks(70, 320, "f8_a8")
    weight = ops.pack_weight(torch.from_numpy(blocks), "f8_a8")
    assert weight.format == "f8_a8" and weight.shape == (70, 320)
    ids = torch.tensor([0, 69, 35], dtype=torch.int32)
    expected = torch.from_numpy(dequantised(blocks, "f8_g"))[ids.long()]
    assert same(weight.rows(ids, torch.float32), expected)
    blocks[3, 9] = 0x7F
    with pytest.raises(ValueError, match="blocks holds 1 e4m3 codes of NaN"):
        ops.pack_weight(torch.from_numpy(blocks), "f8_a8")
