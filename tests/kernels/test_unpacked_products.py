"""Products of many rows with packed weights in fast mode: torch's, of the weight unpacked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cuda_calls import Target, emulated_device, fast
from linear_cases import check_error, inside, needs_emulation, same
from packed_cases import (
    PackedLayer,
    dequantised,
    make_packed,
    pack,
    random_blocks,
    run_packed,
    set_factor,
)

from specdec_ext import ops
from specdec_ext.models import device_unpacked
from specdec_ext.models.device_blocks import StackedWeight
from specdec_ext.models.device_products import Products
from specdec_ext.models.place import Place

MANY = device_unpacked.FEWEST_ROWS  # and for e4m3, which takes fewer
MANY_E4M3 = device_unpacked.FEWEST_ROWS_E4M3
HALVES = [torch.bfloat16, torch.float16]


def place_of(target: Target) -> Place:
    return Place(target.backend, target.device, target.backend)


def multiply(
    target: Target, layer: PackedLayer, *, exact: bool = False, max_rows: int = MANY
) -> torch.Tensor:
    """By Products, x and out inside of poisoned matrices."""
    weight = pack(target, layer)
    products = Products(
        [weight], place_of(target), dtype=layer.x.dtype, max_rows=max_rows, exact=exact
    )
    x, _ = inside(target, layer.x)
    out, whole = inside(target, torch.full((len(x), weight.shape[0]), 7.0, dtype=x.dtype), fill=5.0)
    bias = None if layer.bias is None else target.put(layer.bias)
    assert products(x, weight, bias, out) is out
    values = out.cpu().clone()
    out.fill_(5.0)
    assert bool((whole == 5.0).all()), "written beside out"
    return values


def of_rows(rows: int, columns: int, depth: int, *, bias: bool) -> PackedLayer:
    """e4m3 weights with one scale for each row, and inputs that are rounded, too."""
    layer = make_packed(rows, columns, depth, torch.bfloat16, "f8_a8", bias=bias)
    scales = np.random.default_rng(1).standard_normal((columns, 1)) * 2.0**-12
    set_factor(layer.blocks, "f8_a8", 0, scales)
    return layer


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of 128 k in 16 bits; the last one has fewer."""
    monkeypatch.setattr(device_unpacked, "_PIECE_BYTES", 64 * 128 * 2)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which operations ran."""
    names: list[str] = []

    def spy(module: object, name: str) -> None:
        real = getattr(module, name)

        def run(*args: object, **how: object) -> object:
            names.append(name)
            return real(*args, **how)

        monkeypatch.setattr(module, name, run)

    for name in ("linear", "unpack_weight", "e4m3_rows"):
        spy(ops, name)
    for name in ("mm", "addmm", "_scaled_mm"):
        spy(torch, name)
    return names


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("format", ["q4_0", "q4_g", "q8_0", "q6_k", "f8_g"])
@pytest.mark.usefixtures("small_pieces")
@fast
def test_values(
    target: Target, format: str, dtype: torch.dtype, bias: bool, seen: list[str]
) -> None:
    layer = make_packed(MANY + 3, 150, 128, dtype, format, bias=bias)
    result = multiply(target, layer, max_rows=MANY + 3)
    per_piece = ["unpack_weight", "addmm" if bias else "mm"]
    pieces = 3 if layer.x.shape[1] == 128 else 5  # of 32 rows of 256 k
    assert seen == per_piece * pieces
    check_error(layer.floats(), result)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [64, 144])
@pytest.mark.usefixtures("small_pieces")
@fast
def test_values_in_e4m3(target: Target, columns: int, bias: bool, seen: list[str]) -> None:
    """Pieces of 128 rows, in bytes: of one and of two."""
    layer = of_rows(MANY_E4M3, columns, 128, bias=bias)
    result = multiply(target, layer, max_rows=MANY_E4M3)
    assert seen == ["e4m3_rows", *["unpack_weight", "_scaled_mm"] * (1 + columns // 128)]
    wide = layer.x.double()
    scale = (layer.x.float().abs().amax(1, keepdim=True) / 448).double()
    numbers = (wide.float() / scale.float()).to(torch.float8_e4m3fn).double()
    weight = torch.from_numpy(dequantised(layer.blocks, "f8_a8")).double()
    exact = numbers @ weight.t() * scale
    if layer.bias is not None:
        exact += layer.bias.double()
    size = numbers.abs() @ weight.abs().t() * scale
    # Rounded to bfloat16 once, with a bias twice; on a device sums of e4m3 have few bits.
    error = (result.double() - exact).abs()
    largest = exact.abs() + (0 if layer.bias is None else layer.bias.double().abs())
    assert bool((error <= 2.0**-8 * (2 if bias else 1.01) * largest + 2.0**-12 * size).all())


@fast
def test_a_dense_result_is_written_in_place(target: Target, seen: list[str]) -> None:
    layer = of_rows(MANY, 64, 128, bias=False)
    weight = pack(target, layer)
    products = Products(
        [weight], place_of(target), dtype=torch.bfloat16, max_rows=MANY, exact=False
    )
    out = target.put(torch.zeros(MANY, 64, dtype=torch.bfloat16))
    products(target.put(layer.x), weight, None, out)
    assert same(out.cpu(), multiply(target, layer)) and seen.count("_scaled_mm") == 2


def check_own_kernel(target: Target, layer: PackedLayer, seen: list[str], **how: bool) -> None:
    result = multiply(target, layer, **how)
    assert seen == ["linear"]
    assert same(result, run_packed(target, layer))


@fast
def test_fewer_rows_and_exact_mode_have_this_package_s_kernel(
    target: Target, seen: list[str]
) -> None:
    layer = make_packed(MANY, 40, 128, torch.bfloat16, "q4_0")
    check_own_kernel(target, layer.rows(slice(MANY - 1)), seen)
    seen.clear()
    check_own_kernel(target, of_rows(MANY_E4M3 - 1, 40, 128, bias=False), seen)
    seen.clear()
    check_own_kernel(target, layer, seen, exact=True)


@pytest.mark.parametrize("case", ["scales of blocks", "float16", "8.0", "41 rows"])
@fast
def test_e4m3_inputs_that_torch_does_not_multiply(
    target: Target, case: str, seen: list[str]
) -> None:
    needs_emulation(target, 8 if case == "8.0" else 9)
    if case == "scales of blocks":
        layer = make_packed(MANY, 40, 128, torch.bfloat16, "f8_a8")
    else:
        layer = of_rows(MANY, 41 if case == "41 rows" else 48, 128, bias=True)
    if case == "float16":
        assert layer.bias is not None
        layer = PackedLayer(layer.x.half(), layer.blocks, "f8_a8", layer.bias.half())
    with emulated_device(4, major=8 if case == "8.0" else 9):
        check_own_kernel(target, layer, seen)


@pytest.mark.usefixtures("small_pieces")
@fast
def test_parts_in_several_formats(target: Target) -> None:
    """Each into its columns."""
    layers = [make_packed(MANY, n, 256, torch.bfloat16, f) for n, f in [(40, "q4_0"), (72, "q6_k")]]
    layers.append(of_rows(MANY, 48, 256, bias=True))
    parts = [pack(target, layer) for layer in layers]
    whole = StackedWeight(tuple(parts))
    products = Products([whole], place_of(target), dtype=torch.bfloat16, max_rows=MANY, exact=False)
    x = target.put(layers[0].x)
    out = target.put(torch.full((MANY, 160), math.nan, dtype=torch.bfloat16))
    biases = [layer.bias for layer in layers if layer.bias is not None]
    products(x, whole, target.put(torch.cat(biases)), out)
    first = 0
    for layer in layers:
        n = len(layer.blocks)
        mine = PackedLayer(layers[0].x, layer.blocks, layer.format, layer.bias)
        assert same(out[:, first : first + n].cpu(), multiply(target, mine))
        first += n


@fast
def test_memory_is_taken_only_where_it_is_used(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = torch.from_numpy(random_blocks(96, 128, "q8_0"))
    weight = ops.pack_weight(target.put(blocks), "q8_0")

    def taken(max_rows: int) -> int:
        products = device_unpacked.UnpackedProducts(
            [weight], place_of(target), dtype=torch.bfloat16, max_rows=max_rows
        )
        return products._piece.numel() + products._numbers.numel() + products._scales.numel()

    assert taken(MANY - 1) == 0
    assert taken(MANY) == 96 * 128 * 2
    monkeypatch.setattr(device_unpacked, "_PIECE_BYTES", 70 * 128 * 2)
    assert taken(MANY) == 64 * 128 * 2
    monkeypatch.setattr(device_unpacked, "_PIECE_BYTES", 5)
    assert taken(MANY) == 32 * 128 * 2
