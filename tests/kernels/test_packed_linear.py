"""The linear layer of weights in 8 and 4 bits: bit for bit that of the same weights as floats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cuda_calls import Target, checked, emulated_device, every_backend, fast
from linear_cases import both_families, check_error, needs_emulation, run, same
from ops_arguments import refused
from packed_cases import (
    BITS,
    FACTORS,
    FORMATS,
    HALF_FORMATS,
    KEPT,
    WIDE_FORMATS,
    PackedLayer,
    dequantised,
    e4m3,
    fitting,
    make_packed,
    pack,
    random_blocks,
    run_packed,
    set_factor,
)

from specdec_ext import ops

HALVES = [torch.bfloat16, torch.float16]
# As in test_cuda_linear.py, depths in groups of 32: half tiles of k, tiles of columns that are cut.
SHAPES = [
    (1, 8, 32), (3, 40, 96), (8, 32, 256), (9, 33, 288), (16, 100, 320), (17, 128, 64),
    (32, 130, 224), (33, 129, 640), (64, 64, 544), (65, 140, 160), (128, 127, 96),
    (130, 40, 288), (5, 31, 4160), (20, 24, 8256), (4, 24, 4128),
]  # fmt: skip
CASES = [(f, shape) for f in HALF_FORMATS for shape in SHAPES]
CASES += [(f, shape) for f in WIDE_FORMATS for shape in SHAPES if shape[0] in (1, 5, 9, 17, 33, 65)]
# For 9.0: blocks of one and two warpgroups, rings walked more than once, chains and slices.
STREAM_CASES = [
    ("q4_0", (3, 72, 3232)), ("q8_0", (30, 130, 1312)), ("q4_1", (60, 300, 1056)),
    ("q8_g", (84, 520, 256)), ("q4_0", (90, 513, 928)), ("q6_k", (100, 300, 96)),
    ("f8_g", (140, 290, 192)), ("q4_g", (84, 140, 2112)), ("q5_k", (64, 258, 256)),
]  # fmt: skip


formats = pytest.mark.parametrize("format", FORMATS)


def check_values(target: Target, format: str, shape: tuple[int, int, int]) -> None:
    dtype = HALVES[sum(shape) % 2]
    layer = make_packed(*shape, dtype, format, bias=shape[0] % 3 > 0)
    result = run_packed(target, layer)
    check_error(layer.floats(), result)
    assert same(result, run(target, layer.floats()))
    assert same(run_packed(target, layer, out_shift=3, aside=False), result)


@pytest.mark.parametrize(("format", "shape"), CASES, ids=str)
@both_families
@every_backend
def test_values_are_those_of_the_weight_as_floats(
    target: Target, format: str, shape: tuple[int, int, int]
) -> None:
    """The kernel of 16-bit weights for the same device sums in the same order; so does the CPU."""
    check_values(target, format, shape)


@pytest.mark.parametrize(("format", "shape"), STREAM_CASES, ids=str)
@checked
def test_values_of_the_stream_kernel(
    target: Target, format: str, shape: tuple[int, int, int]
) -> None:
    check_values(target, format, shape)
    with emulated_device(4):
        check_values(target, format, shape)


@pytest.mark.parametrize("columns", [1, 31, 32, 70])
@pytest.mark.parametrize("depth", [32, 64, 96, 512])
@formats
def test_packing_loses_nothing(format: str, columns: int, depth: int) -> None:
    depth = fitting(depth, format)
    blocks = random_blocks(columns, depth, format)
    weight = ops.pack_weight(torch.from_numpy(blocks), format.split("/")[0])
    assert weight.shape == (columns, depth)
    kept = KEPT.get(format, format)
    if depth % 64:
        kept = {"q4_g": "q4_k", "q8_g": "q6_k"}.get(kept, kept)
    assert weight.format == kept
    ids = torch.tensor([0, columns - 1, columns // 2], dtype=torch.int32)
    expected = torch.from_numpy(dequantised(blocks, format))[ids.long()]
    assert same(weight.rows(ids, torch.float32), expected)
    assert same(weight.rows(ids, torch.bfloat16), expected.bfloat16())
    tiles = -(-columns // 32) * -(-depth // 64)
    assert weight.nbytes == tiles * 32 * 64 * BITS[kept] / 8


@pytest.mark.parametrize("format", FORMATS)
def test_parts_of_a_large_weight_are_packed_one_after_another(format: str) -> None:
    blocks = np.tile(random_blocks(33, fitting(32, format), format), (130, 1))
    weight = ops.pack_weight(torch.from_numpy(blocks), format.split("/")[0])
    ids = torch.arange(len(blocks))
    expected = np.tile(dequantised(blocks[:33], format), (130, 1))
    assert same(weight.rows(ids, torch.float32), torch.from_numpy(expected))


@formats
@both_families
@fast
def test_a_row_has_the_bits_it_has_alone(target: Target, format: str) -> None:
    """In calls of every number of rows."""
    layer = make_packed(130, 40, 288, torch.bfloat16, format)
    weight = pack(target, layer)
    alone = torch.cat([run_packed(target, layer.rows([r]), weight=weight) for r in range(130)])
    for count in range(1, 131):
        assert same(run_packed(target, layer.rows(slice(count)), weight=weight), alone[:count])


@pytest.mark.parametrize(("columns", "depth"), [(520, 288), (72, 3232)])
@fast
def test_one_row_and_the_same_among_84(target: Target, columns: int, depth: int) -> None:
    """Over every tile; with chains, and slices that are added."""
    layer = make_packed(130, columns, depth, torch.bfloat16, "q4_0")
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


@fast
def test_rows_that_share_memory(target: Target) -> None:
    """As of a tensor that was expanded, which the copy engine cannot describe."""
    layer = make_packed(6, 40, 160, torch.bfloat16, "q4_1")
    expected = run_packed(target, layer.rows([2] * 6))
    assert layer.bias is not None
    out = target.put(torch.full((6, 40), math.nan, dtype=torch.bfloat16))
    ops.linear(target.put(layer.x)[2:3].expand(6, -1), pack(target, layer), out=out,
               bias=target.put(layer.bias), backend=target.backend)  # fmt: skip
    assert same(out.cpu(), expected)


@fast
def test_some_columns_are_cut_as_the_matrix_they_are_of(target: Target) -> None:
    layer = make_packed(5, 10304, 4128, torch.bfloat16, "q4_0", bias=False)
    x, out = target.put(layer.x), target.put(torch.zeros(5, 64, dtype=torch.bfloat16))
    expected = run_packed(target, layer)[:, 128:192]
    part = dataclasses.replace(layer, blocks=layer.blocks[128:192])
    ops.linear(x, pack(target, part), out=out, cut_columns=10304, backend=target.backend)
    assert same(out.cpu(), expected)


@fast
def test_how_the_work_is_cut_does_not_show(target: Target) -> None:
    """On 8.0: a block for each group of k, or, of many columns, all groups in one; every tile."""
    needs_emulation(target, 8)
    with emulated_device(4, major=8):
        check_cuts(target)


def check_cuts(target: Target) -> None:
    layer = make_packed(84, 24, 4128, torch.float16, "q4_1", bias=False)
    few = pack(target, layer)
    expected = run_packed(target, layer, weight=few)
    for count in (1, 9, 17, 33):
        assert same(run_packed(target, layer.rows(slice(count)), weight=few), expected[:count])
    beside = np.zeros((3836, layer.blocks.shape[1]), np.uint8)
    wide = dataclasses.replace(layer.rows([0, 5]), blocks=np.concatenate([layer.blocks, beside]))
    result = run_packed(target, wide)
    assert same(result[:, :24], expected[[0, 5]]) and not result[:, 24:].any()


@pytest.mark.parametrize("rows", [3, 12, 30, 60, 90, 100])
@formats
@both_families
@checked
def test_a_nan_stays_in_its_row_and_its_column(target: Target, format: str, rows: int) -> None:
    layer = make_packed(rows, 70, 160, torch.bfloat16, format)
    clean = run_packed(target, layer)
    x, blocks = layer.x.clone(), layer.blocks.copy()
    x[1, 5] = math.nan
    set_factor(blocks, format, 0, math.nan, slice(33, 34))
    result = run_packed(target, dataclasses.replace(layer, x=x, blocks=blocks))
    kept = torch.ones(rows, 70, dtype=torch.bool)
    kept[1] = False
    kept[:, 33] = False
    assert same(result[kept], clean[kept])
    assert bool(result[1].isnan().all()) and bool(result[:, 33].isnan().all())


@pytest.mark.parametrize("rows", [3, 100])
@formats
@both_families
@checked
def test_what_lies_in_a_tile_past_the_last_column_does_not_matter(
    target: Target, format: str, rows: int
) -> None:
    """Whatever numbers and scales it has, NaN too."""
    layer = make_packed(rows, 64, 96, torch.float16, format)
    expected = run_packed(target, layer)[:, :37]
    blocks = layer.blocks.copy()
    # Where scales are float32 the layout follows from their bits, and e4m3 has no such NaN.
    blocks[37:] = 0xFF if format in HALF_FORMATS else 0xF0
    whole = pack(target, dataclasses.replace(layer, blocks=blocks))
    weight = dataclasses.replace(whole, shape=(37, whole.shape[1]))
    assert layer.bias is not None
    cut = dataclasses.replace(layer, blocks=blocks[:37], bias=layer.bias[:37].clone())
    assert same(run_packed(target, cut, weight=weight), expected)


HALF_SCALES = [65504, -65504, 2.0**-24, -(2.0**-24), 2.0**-14, 0.0, -0.0, 1.0]
WIDE_SCALES = [3e38, -7e35, 2.0**-149, -(2.0**-127), 1e-40, 0.0, -0.0, 1 / 3]


@pytest.mark.parametrize("dtype", HALVES)
@formats
@both_families
@checked
def test_extreme_scales_round_as_torch_rounds(
    target: Target, format: str, dtype: torch.dtype
) -> None:
    """To infinity; subnormal elements stay what they are."""
    depth = fitting(64, format)
    blocks = random_blocks(8, depth, format)
    factors = FACTORS[format.split("/")[0]]
    scales = np.array(WIDE_SCALES if factors[0][1] == "<f4" else HALF_SCALES, np.float32)[:, None]
    if format in ("q4_g", "q4_g/32"):  # 20 bits
        scales = (scales.view(np.int32) & ~15).view(np.float32)
    if format == "f8_g":
        scales[0] = 2.0**119
    for which in range(len(factors)):
        set_factor(blocks, format, which, scales[:: 1 - 2 * which])
    if format in ("q4_g/32", "q8_g/32"):
        set_factor(blocks[7:], format, 0, np.array([[1.0, 2.0]]))
    layer = PackedLayer(torch.eye(depth).to(dtype), blocks, format, None)
    result = run_packed(target, layer)
    weight = layer.floats().weight
    finite = torch.isfinite(weight).all(1)
    assert same(result.t()[finite] + 0.0, weight[finite] + 0.0)
    assert not bool(torch.isfinite(result.t()[~finite]).all(1).any())


@pytest.mark.parametrize("dtype", HALVES)
@both_families
@checked
def test_a_product_is_rounded_before_its_minimum(target: Target, dtype: torch.dtype) -> None:
    """Scales of 24 bits, and minimums by which rounding once or twice shows in 16 bits."""
    rng = np.random.default_rng(7)
    scales = (1 + rng.random(400) * 0.06).astype(np.float32)
    exact, rounded = scales.astype(np.float64) * 15, scales * np.float32(15)
    scales = scales[exact - rounded > 2.0**-22][:40, None]
    tie = np.float32(
        1 + 2.0 ** (-11 if dtype == torch.float16 else -8)
    )  # rounded to 1, which is even
    minimums = tie - scales * np.float32(15)
    assert (
        len(scales) == 40 and ((scales.astype(np.float64) * 15 + minimums).astype("f4") > tie).all()
    )
    blocks = np.full((40, 48), 0xFF, np.uint8)
    set_factor(blocks, "q4_g", 0, scales)
    set_factor(blocks, "q4_g", 1, minimums)
    for rows in (8, 64):
        layer = PackedLayer(torch.eye(64).to(dtype)[:rows], blocks, "q4_g", None)
        assert bool((run_packed(target, layer) == 1).all())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [8, 64])
@both_families
@checked
def test_every_number_of_e4m3(target: Target, rows: int, dtype: torch.dtype) -> None:
    """All 254 codes, subnormal ones too, at every place of a lane's vectors."""
    codes = np.array([[code for code in range(256) if code & 127 != 127] + [0, 128]], np.uint8)
    blocks = np.concatenate([np.roll(codes, 5 * i, 1) for i in range(33)]).reshape(33, 4, 64)
    ones = np.ones((33, 4, 1), np.float32).view(np.uint8)
    blocks = np.concatenate([ones, blocks], -1).reshape(33, -1)
    x = torch.zeros(64, 256, dtype=dtype)
    for first in range(0, 256, 64):
        x[torch.arange(64), first + torch.arange(64)] = 1
        layer = PackedLayer(x[:rows], blocks, "f8_g", None)
        result = run_packed(target, layer)
        table = np.array([e4m3(int(code)) for code in range(256)])
        expected = table[blocks.reshape(33, 4, 68)[:, first // 64, 4:]][:, :rows]
        assert torch.equal(result.float().t(), torch.from_numpy(expected))
        x[:] = 0


@pytest.mark.parametrize("rows", [3, 40])
@both_families
@checked
def test_x_is_read_behind_the_kernel_that_writes_it(target: Target, rows: int) -> None:
    layer = make_packed(rows, 40, 288, torch.bfloat16, "q4_0")
    x, weight = target.put(layer.x), pack(target, layer)
    scale = target.put(torch.ones(288, dtype=torch.bfloat16))
    out = target.put(torch.empty(rows, 40, dtype=torch.bfloat16))
    results = []
    for constant in (False, True):
        normed = torch.empty_like(x)
        ops.rms_norm(x, scale, out=normed, backend=target.backend)
        ops.linear(normed, weight, out=out, constant_weight=constant, backend=target.backend)
        results.append(out.clone())
    assert same(*results)


@pytest.mark.parametrize(("rows", "units"), [(12, 4), (70, 8)])
@both_families
@checked
def test_less_scratch_takes_more_launches(target: Target, rows: int, units: int) -> None:
    layer = make_packed(rows, 37, 4128, torch.bfloat16, "q8_0")
    expected = run_packed(target, layer)
    x, weight = target.put(layer.x), pack(target, layer)
    assert layer.bias is not None
    for count in (5, 69):
        out = target.put(torch.full((rows, 37), math.nan, dtype=torch.bfloat16))
        room = target.put(torch.full((count * units * 40 + 63,), math.nan))
        ops.linear(x, weight, out=out, bias=target.put(layer.bias), backend=target.backend,
                   workspace=room)  # fmt: skip
        assert same(out.cpu(), expected)


@every_backend
def test_no_rows(target: Target) -> None:
    assert run_packed(target, make_packed(0, 5, 32, torch.float16, "q8_0")).shape == (0, 5)


X = torch.zeros(2, 64, dtype=torch.bfloat16)
OUT = torch.zeros(2, 3, dtype=torch.bfloat16)
F8 = torch.zeros(1, 68, dtype=torch.uint8)
LARGE = torch.tensor([[-2e38]])
W = ops.pack_weight(torch.zeros(3, 36, dtype=torch.uint8), "q4_0")


def cut(**parts: object) -> ops.PackedWeight:
    return dataclasses.replace(W, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text", "call"),
    [
        (ValueError, "format = 'q2_k': a device has kernels for q8_0, q4_0, q4_1, q4_g, q8_g, q4_k",
         lambda: ops.pack_weight(torch.zeros(3, 36, dtype=torch.uint8), "q2_k")),
        (ValueError, "blocks holds 3 e4m3 codes of NaN: give numbers",
         lambda: ops.pack_weight(torch.cat([F8[:, :65], F8[:, :3] | 255], 1), "f8_g")),
        (ValueError, "blocks holds a scale of 2e+38: e4m3 takes scales below 2^120",
         lambda: ops.pack_weight(torch.cat([LARGE.view(torch.uint8), F8[:, 4:]], 1), "f8_g")),
        (ValueError, "blocks has shape [3, 36]: expected [N, bytes], rows of whole blocks of 144",
         lambda: ops.pack_weight(torch.zeros(3, 36, dtype=torch.uint8), "q4_k")),
        (ValueError, "x has 96 columns: a weight in f8_g has whole groups of 64",
         lambda: ops.linear(torch.zeros(2, 96, dtype=X.dtype),
                            dataclasses.replace(ops.pack_weight(F8, "f8_g"), shape=(1, 96)),
                            out=OUT[:, :1])),
        (TypeError, "blocks has dtype torch.int8: expected uint8",
         lambda: ops.pack_weight(torch.zeros(3, 36, dtype=torch.int8), "q4_0")),
        (ValueError, "blocks has shape [3, 35]: expected [N, bytes], rows of whole blocks of 18",
         lambda: ops.pack_weight(torch.zeros(3, 35, dtype=torch.uint8), "q4_0")),
        (ValueError, "blocks has shape [0, 36]: expected [N, bytes]",
         lambda: ops.pack_weight(torch.zeros(0, 36, dtype=torch.uint8), "q4_0")),
        (ValueError, "weight has shape [3, 64]: expected [N, K] = [any, 32]",
         lambda: ops.linear(X[:, :32], W, out=OUT)),
        (ValueError, "x has 40 columns: a weight in q4_0 has whole groups of 32",
         lambda: ops.linear(X[:, :40], cut(shape=(3, 40)), out=OUT)),
        (TypeError, "x has dtype float32: expected bfloat16 or float16",
         lambda: ops.linear(X.float(), W, out=OUT.float())),
        (ValueError, "x has rows that do not begin at multiples of 16 bytes",
         lambda: ops.linear(torch.zeros(2, 65, dtype=X.dtype)[:, 1:], W, out=OUT)),
        (ValueError, "weight has 1151 bytes: q4_0 [3, 64] takes 1152",
         lambda: ops.linear(X, cut(data=W.data[1:]), out=OUT)),
        (ValueError, "weight has 1152 bytes: q4_0 [33, 64] takes 2304",
         lambda: ops.linear(X, cut(shape=(33, 64)), out=torch.zeros(2, 33, dtype=X.dtype))),
        (TypeError, "weight has dtype int8: expected uint8",
         lambda: ops.linear(X, cut(data=W.data.view(torch.int8)), out=OUT)),
        (ValueError, "format = 'q2_k': give q8_0, q4_0, q4_1, q4_g, q4_k",
         lambda: ops.linear(X, cut(format="q2_k"), out=OUT)),
        (ValueError, "weight has 0 rows: give 1..16777216",
         lambda: ops.linear(X, cut(shape=(0, 64)), out=OUT[:, :0])),
        (ValueError, "out has shape [2, 2]: expected [R, N] = [2, 3]",
         lambda: ops.linear(X, W, out=OUT[:, :2])),
        (TypeError, "out has dtype float16: expected bfloat16",
         lambda: ops.linear(X, W, out=OUT.half())),
    ],
)  # fmt: skip
def test_refusals(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    refused(kind, text, call)
