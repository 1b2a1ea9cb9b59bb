"""The linear layer of a few rows, against float64 and against itself on other rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cuda_calls import Target, checked, emulated_device, every_backend, fast
from linear_cases import (
    Layer,
    both_families,
    cancelling_layer,
    check_error,
    exact,
    make_layer,
    needs_emulation,
    run,
    same,
)
from ops_arguments import refused

from specdec_ext import ops

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]

# Rows, columns, depth: every tile, at its first and last row and beside a tile's columns; one
# chunk, cut chunks, parts of one chunk and of several, empty and almost empty ones, several groups.
SHAPES = [
    (1, 8, 8), (3, 40, 72), (8, 32, 256), (9, 33, 264), (16, 100, 320), (17, 128, 64),
    (32, 130, 200), (33, 129, 640), (64, 64, 520), (65, 140, 136), (128, 127, 72),
    (130, 40, 264), (5, 31, 4160), (20, 24, 8264), (4, 24, 4104), (40, 9, 4104),
]  # fmt: skip
# For 9.0 also blocks of one, two and four warpgroups, whole and past the last column, rings walked
# more than once, chains and slices.
STREAM_SHAPES = [
    (30, 130, 1288), (60, 300, 1032), (84, 520, 200), (90, 513, 904), (100, 1030, 72),
    (140, 530, 136), (84, 140, 2056), (32, 1000, 136), (60, 1000, 136),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@checked
def test_values_on_8_0(target: Target, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    with emulated_device(4, major=8):
        layer = make_layer(*shape, dtype)
        check_error(layer, run(target, layer))


@pytest.mark.parametrize("shape", STREAM_SHAPES, ids=str)
@checked
def test_values_of_the_stream_kernel(target: Target, shape: tuple[int, int, int]) -> None:
    layer = make_layer(*shape, torch.bfloat16 if shape[0] % 20 else torch.float16)
    check_error(layer, run(target, layer))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@every_backend
def test_values(target: Target, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    for bias in (False, True):
        layer = make_layer(*shape, dtype, bias=bias)
        check_error(layer, run(target, layer))


@pytest.mark.parametrize("depth", [1, 7, 63, 65, 100, 136])
@pytest.mark.parametrize("dtype", DTYPES)
@every_backend
def test_any_depth_and_any_address(target: Target, dtype: torch.dtype, depth: int) -> None:
    """Rows that 16-byte copies cannot reach are served too; out's address changes no bit."""
    layer = make_layer(10, 35, depth, dtype)
    for shifts in ((8, 8, 8), (1, 8, 8), (8, 1, 8)):
        result = run(target, layer, shifts=shifts)
        check_error(layer, result)
        assert same(run(target, layer, shifts=(*shifts[:2], 3)), result)


@pytest.mark.parametrize("rows", [3, 40])
@both_families
@checked
def test_x_is_read_behind_the_kernel_that_writes_it(target: Target, rows: int) -> None:
    """A weight that was there before may be read while the norm in front of the layer still runs;
    its result may not."""
    layer = make_layer(rows, 40, 264, torch.bfloat16)
    x, weight = target.put(layer.x), target.put(layer.weight)
    scale = target.put(torch.ones(264, dtype=torch.bfloat16))
    out = target.put(torch.empty(rows, 40, dtype=torch.bfloat16))
    results = []
    for constant in (False, True):
        normed = torch.empty_like(x)
        ops.rms_norm(x, scale, out=normed, backend=target.backend)
        ops.linear(normed, weight, out=out, constant_weight=constant, backend=target.backend)
        results.append(out.clone())
    assert same(*results)


# Depths of one part, of four, of two groups. The float32 kernel has one arithmetic for all.
EXACT_DEPTHS = [(torch.bfloat16, 64), (torch.bfloat16, 264), (torch.float16, 4168)]


@pytest.mark.parametrize(("dtype", "depth"), [*EXACT_DEPTHS, (torch.float32, 72)], ids=str)
@both_families
@fast
def test_a_row_has_the_bits_it_has_alone(target: Target, dtype: torch.dtype, depth: int) -> None:
    """In calls of every number of rows."""
    counts = range(1, 131) if depth < 4096 else (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 130)
    layer = cancelling_layer(130, 40, depth, dtype)
    alone = torch.cat([run(target, layer.rows([r])) for r in range(130)])
    assert int(alone.count_nonzero()) > 1000
    for count in counts:
        assert same(run(target, layer.rows(slice(count))), alone[:count]), count


@pytest.mark.parametrize(("columns", "depth"), [(520, 264), (72, 3208)])
@pytest.mark.parametrize("dtype", HALVES)
@fast
def test_one_row_and_the_same_among_84(
    target: Target, dtype: torch.dtype, columns: int, depth: int
) -> None:
    """Over every instance; with chains, and slices that are added."""
    layer = cancelling_layer(130, columns, depth, dtype)
    expected = run(target, layer.rows(slice(84)))
    for row in (0, 7, 41, 83):
        assert same(run(target, layer.rows([row])), expected[row : row + 1]), row
    for count in (8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 130):
        result = run(target, layer.rows(slice(count)))
        assert same(result[:84], expected[:count]), count


@fast
def test_rows_that_share_memory(target: Target) -> None:
    """As of a tensor that was expanded, which the copy engine cannot describe."""
    layer = make_layer(6, 40, 136, torch.bfloat16)
    expected = run(target, layer.rows([2] * 6))
    x, weight = (target.put(t) for t in (layer.x, layer.weight))
    assert layer.bias is not None
    out = target.put(torch.full((6, 40), math.nan, dtype=torch.bfloat16))
    ops.linear(x[2:3].expand(6, -1), weight, out=out, bias=target.put(layer.bias),
               backend=target.backend)  # fmt: skip
    assert same(out.cpu(), expected)
    columns = weight[3:4].expand(40, -1)
    ops.linear(x, columns, out=out, backend=target.backend)
    check_error(Layer(layer.x, layer.weight[[3] * 40], None), out.cpu())


@pytest.mark.parametrize("dtype", HALVES)
@both_families
@fast
def test_rows_do_not_matter_wherever_they_stand(target: Target, dtype: torch.dtype) -> None:
    layer = make_layer(130, 136, 328, dtype)
    expected = run(target, layer)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(3)).tolist()
    assert same(run(target, layer.rows(order)), expected[order])
    assert same(run(target, layer.rows([5] * 70)), expected[[5] * 70])


@fast
def test_how_the_work_is_cut_does_not_show(target: Target) -> None:
    """On 8.0: enough columns or rows that no partial sums are made, against few: the same bits."""
    needs_emulation(target, 8)
    with emulated_device(4, major=8):
        check_cuts(target)


def check_cuts(target: Target) -> None:
    # All groups in one block, against a block for each.
    deep = cancelling_layer(2, 3840, 4104, torch.bfloat16)
    few = Layer(deep.x, deep.weight[:40].contiguous(), None)
    assert same(run(target, deep)[:, :40], run(target, few))
    # A group in one block, against a block for each of its parts.
    tall = cancelling_layer(128 * 120, 8, 136, torch.bfloat16)
    result = run(target, tall)
    for first in (0, 128 * 77 + 3):
        part = slice(first, first + 100)
        assert same(result[part], run(target, tall.rows(part)))


@pytest.mark.parametrize("rows", [3, 12, 30, 60, 100])
@both_families
@checked
def test_a_nan_stays_in_its_row_and_its_column(target: Target, rows: int) -> None:
    layer = make_layer(rows, 70, 136, torch.bfloat16)
    clean = run(target, layer)
    x, weight = layer.x.clone(), layer.weight.clone()
    x[1, 5], x[2, 135] = math.nan, math.inf
    weight[33, 64], weight[69, 0] = math.nan, -math.inf
    result = run(target, Layer(x, weight, layer.bias))
    kept = torch.ones(rows, 70, dtype=torch.bool)
    kept[1:3] = False
    kept[:, [33, 69]] = False
    assert same(result[kept], clean[kept])
    assert bool(result[1].isnan().all()) and bool(result[:, 33].isnan().all())
    finite = result[torch.arange(rows) > 2][:, 69].isinf() | (x[3:, 0] == 0)
    assert not result[2].isfinite().any() and bool(finite.all())


@pytest.mark.parametrize("rows", [4, 40])
@both_families
@checked
def test_the_same_call_gives_the_same_bits(target: Target, rows: int) -> None:
    """Whatever the schedule, and wherever the weight may be read ahead."""
    layer = make_layer(rows, 66, 4168, torch.float16)
    first = run(target, layer)
    for aside in (True, False, True):
        assert same(run(target, layer, aside=aside), first)


class Asked(Exception):
    """Says how much scratch a call asks for, before it runs."""


def scratch_asked(target: Target, rows: int, columns: int, depth: int) -> int:
    """Bytes, by a call whose inputs are one row each, repeated. Nobody touches out's memory."""

    def refuse(num_bytes: int) -> torch.Tensor:
        raise Asked(num_bytes)

    row = target.put(torch.zeros(1, max(columns, depth), dtype=torch.bfloat16))
    x, weight = row[:, :depth].expand(rows, -1), row.clone()[:, :depth].expand(columns, -1)
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=row.device)
    with pytest.raises(Asked) as caught:
        ops.linear(x, weight, out=out, backend=target.backend, workspace=refuse)
    return int(caught.value.args[0])


@fast
def test_scratch_is_bounded(target: Target) -> None:
    # On whichever device: groups or parts of 8.0, slices of 9.0.
    assert scratch_asked(target, 3, 64, 8192) == 8 * 3 * 64 * 4
    assert scratch_asked(target, 3, 61, 8192) == 8 * 3 * 64 * 4
    assert scratch_asked(target, 3, 64, 4104) == 4 * 3 * 64 * 4
    assert scratch_asked(target, 3, 4096, 4104) == 4 * 3 * 4096 * 4
    assert scratch_asked(target, 40, 64, 8192) == 8 * 40 * 64 * 4
    # A grid's second dimension, which the rows of a launch are when sums are folded.
    assert 60_000 * 1024 < scratch_asked(target, 70_000, 64, 4104) <= 65_535 * 1024
    for rows, columns in ((4096, 4096), (100, 150_000), (30_000, 40_000)):
        asked = scratch_asked(target, rows, columns, 8192)
        assert 100 << 20 < asked <= 128 << 20
        told = ops.linear_scratch_bytes(rows, columns, 8192, torch.bfloat16, backend=target.backend)
        assert told == asked
    assert ops.linear_scratch_bytes(4, 64, 8192, torch.float32, backend=target.backend) == 0
    assert ops.linear_scratch_bytes(4, 64, 2000, torch.float16, backend=target.backend) == 0


@pytest.mark.parametrize(("rows", "units"), [(12, 4), (70, 8)])
@both_families
@checked
def test_less_scratch_takes_more_launches(target: Target, rows: int, units: int) -> None:
    layer = make_layer(rows, 37, 4104, torch.bfloat16)
    expected = run(target, layer)
    x, weight, bias = (target.put(t) for t in (layer.x, layer.weight, layer.bias))
    for fitting in (5, 64, 69):
        out = target.put(torch.full((rows, 37), math.nan, dtype=torch.bfloat16))
        room = target.put(torch.full((fitting * units * 40 + 63,), math.nan))
        ops.linear(x, weight, out=out, bias=bias, backend=target.backend, workspace=room)
        assert same(out.cpu(), expected)


@every_backend
def test_no_rows(target: Target) -> None:
    layer = make_layer(0, 5, 8, torch.float32)
    assert run(target, layer).shape == (0, 5)


def test_exact_is_what_it_says() -> None:
    layer = Layer(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]]), torch.tensor([0.5]))
    assert exact(layer).tolist() == [[13.5]]


X, W = torch.zeros(2, 8), torch.ones(3, 8)
OUT = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("kind", "text", "call"),
    [
        (ValueError, "x has shape [8]: expected [R, K]", lambda: ops.linear(X[0], W, out=OUT)),
        (TypeError, "x has dtype int32: expected float32",
         lambda: ops.linear(X.int(), W, out=OUT)),
        (ValueError, "x has shape [2, 0]: give 1..1073741824 columns",
         lambda: ops.linear(X[:, :0], W[:, :0], out=OUT)),
        (ValueError, "x has stride 8 on its last axis",
         lambda: ops.linear(torch.zeros(8, 8).T, W, out=torch.zeros(8, 3))),
        (ValueError, "weight has shape [3, 7]: expected [N, K] = [any, 8]",
         lambda: ops.linear(X, W[:, :7], out=OUT)),
        (TypeError, "weight has dtype float16: expected float32",
         lambda: ops.linear(X, W.half(), out=OUT)),
        (ValueError, "weight has 0 rows: give 1..16777216",
         lambda: ops.linear(X, W[:0], out=OUT[:, :0])),
        (ValueError, "out has shape [2, 2]: expected [R, N] = [2, 3]",
         lambda: ops.linear(X, W, out=OUT[:, :2])),
        (TypeError, "out has dtype bfloat16: expected float32",
         lambda: ops.linear(X, W, out=OUT.bfloat16())),
        (ValueError, "out begins where x does: it is written while that is read",
         lambda: ops.linear(X, W, out=X[:, :3])),
        (ValueError, "out begins where weight does",
         lambda: ops.linear(X, W, out=W[:2, :3])),
        (ValueError, "bias has shape [2]: expected [N] = [3]",
         lambda: ops.linear(X, W, out=OUT, bias=torch.zeros(2))),
        (TypeError, "bias has dtype bfloat16: expected float32",
         lambda: ops.linear(X, W, out=OUT, bias=torch.zeros(3).bfloat16())),
        (ValueError, "rows = -1: give 0 or more",
         lambda: ops.linear_scratch_bytes(-1, 1, 1, torch.float16, backend="cpu")),
        (ValueError, "columns = 0: give 1..16777216",
         lambda: ops.linear_scratch_bytes(1, 0, 1, torch.float16, backend="cpu")),
        (ValueError, "depth = 0: give 1..1073741824",
         lambda: ops.linear_scratch_bytes(1, 1, 0, torch.float16, backend="cpu")),
        (ValueError, "dtype = 'int8': give float32, bfloat16 or float16",
         lambda: ops.linear_scratch_bytes(1, 1, 1, torch.int8, backend="cpu")),
        (ValueError, 'backend = "nothing"',
         lambda: ops.linear(X, W, out=OUT, backend="nothing")),
    ],
)  # fmt: skip
def test_refusals(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    refused(kind, text, call)


@checked
def test_too_little_scratch_is_refused(target: Target) -> None:
    layer = make_layer(4, 40, 4104, torch.bfloat16)
    x, weight, out = (target.put(t) for t in (layer.x, layer.weight, torch.zeros(4, 40).bfloat16()))
    room = target.put(torch.zeros(300, dtype=torch.uint8))

    def call() -> None:
        ops.linear(x, weight, out=out, backend=target.backend, workspace=room)

    with pytest.raises(ValueError, match=r"workspace has \d+ bytes .*: linear needs 640 here"):
        call()


@pytest.mark.parametrize("major", [9, 8])
@fast
def test_a_part_has_the_bits_of_the_whole(target: Target, major: int) -> None:
    """Few columns are cut into more slices, unless the product says of how many they are a part."""
    needs_emulation(target, major)
    with emulated_device(4, major=major):
        layer = cancelling_layer(2, 10240, 4096, torch.bfloat16)
        x, weight = target.put(layer.x), target.put(layer.weight)
        whole = target.put(torch.empty(2, 10240, dtype=torch.bfloat16))
        ops.linear(x, weight, out=whole, backend=target.backend)
        differing = 0
        for columns in (slice(0, 96), slice(1000, 1100)):
            part = weight[columns]
            own, cut = (torch.empty_like(whole[:, columns]).contiguous() for _ in range(2))
            ops.linear(x, part, out=own, backend=target.backend)
            ops.linear(x, part, out=cut, cut_columns=10240, backend=target.backend)
            assert same(cut, whole[:, columns].contiguous())
            differing += not same(own, cut)
        assert (differing > 0) == (major == 9)
        with pytest.raises(ValueError, match=r"cut_columns = 95: give 0, or 96\.\."):
            ops.linear(x, weight[:96], out=own[:, :96], cut_columns=95, backend=target.backend)
