"""PackedLinear of e4m3 weights with a scale for 64 elements (f8_g, f8_a8), against float64.

Each weight is a bfloat16 number times its scale, so the products are those of bfloat16; what may
differ from float64 is the rounding of float32 sums. In f8_a8 they are those of f8_g with rows that
were rounded to e4m3 before.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from specdec_ext import _core

GROUP = 64
ISAS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")
SHAPES = [(1, 64), (31, 128), (32, 192), (33, 576), (96, 768), (100, 1536)]


def values_of(codes: np.ndarray) -> np.ndarray:
    """float64 of e4m3 codes, by torch."""
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()


def make_weight(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 [N, bytes of a row], float64 [N, K]): all codes but NaN, scales of many sizes."""
    rng = np.random.default_rng([seed, n, k])
    codes = rng.integers(0, 256, (n, k // GROUP, GROUP), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] ^= 1
    scale = (rng.normal(size=(n, k // GROUP, 1)) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)
    scale[rng.random(scale.shape) < 0.05] = 0
    blocks = np.concatenate([scale.view(np.uint8), codes], axis=-1).reshape(n, -1)
    return blocks, (values_of(codes) * scale).reshape(n, k)


def make_rows(rows: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, rows, k])
    x = rng.normal(size=(rows, k)) * 10.0 ** rng.integers(-3, 3, (rows, 1))
    return torch.from_numpy(x).bfloat16().float().numpy()


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of float32 as e4m3 numbers, by torch's conversion, and the rows' scales [rows, 1]."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scale = np.maximum(largest / np.float32(448), np.float32(2.0**-100))
        scale[~np.isfinite(largest)] = np.nan
        quotients = torch.from_numpy((x / scale).clip(-448, 448))
    return quotients.to(torch.float8_e4m3fn).float().numpy(), scale


def hostile_rows(k: int) -> np.ndarray:
    """Rows of every size, up to the largest and down to the least."""
    x = make_rows(24, k, seed=3)
    x /= np.abs(x).max(axis=1, keepdims=True)
    x[:, -1] = 1  # the largest
    largest = [
        448, 450, 446, 452, 256, 255, 1.75, 1.7578125, 3.3895314e38, 3.38e38, 2.98e38, 2.0**127,
        1e-30, 1e-38, 1e-40, 9.2e-41, 0.0, 1, 2.0**-100, 2.0**-92, 2.0**-91, 7e4, 6e-8, 2.0**60,
    ]  # fmt: skip
    x = x.astype(np.float64) * np.array(largest)[:, None]
    return torch.from_numpy(x).bfloat16().float().numpy()


def run(linear: _core.PackedLinear, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), linear.out_features), np.nan, np.float32)
    linear.run(x, out)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pack_loses_nothing(shape: tuple[int, int]) -> None:
    blocks, weight = make_weight(*shape)
    values = np.empty(shape, np.float32)
    _core.dequantize((blocks, "f8_g"), values)
    assert np.array_equal(values, weight.astype(np.float32))
    rows = np.full(shape, np.nan, np.float32)
    order = np.random.default_rng(1).permutation(shape[0]).astype(np.int32)
    _core.PackedLinear((blocks, "f8_g")).unpack_rows(order, rows)
    assert np.array_equal(rows, values[order])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, int], bias: bool) -> None:
    n, k = shape
    blocks, weight = make_weight(n, k)
    x = make_rows(30, k)
    b = np.random.default_rng(2).normal(size=n).astype(np.float32) if bias else None
    found = run(_core.PackedLinear((blocks, "f8_g"), b), x)
    exact = x.astype(np.float64) @ weight.T + (0 if b is None else b)
    size = np.abs(x).astype(np.float64) @ np.abs(weight).T + (0 if b is None else np.abs(b))
    # A sum of k/2 + k/64 + 1 roundings, each at most half a unit of what was added up by then.
    assert (np.abs(found - exact) <= size * (k / 2 + k / GROUP + 2) * 2.0**-24).all()
    # Twice the error of torch in float32 over the same numbers, where torch has one.
    theirs = (torch.from_numpy(x) @ torch.from_numpy(weight.astype(np.float32)).T).numpy()
    theirs = theirs if b is None else theirs + b
    assert np.abs(found - exact).max() <= 2 * np.abs(theirs - exact).max() + size.max() * 2.0**-24


def test_a_row_does_not_depend_on_the_others_or_on_threads() -> None:
    blocks, _ = make_weight(100, 1536)
    linear = _core.PackedLinear((blocks, "f8_g"))
    x = make_rows(130, 1536)
    alone = np.concatenate([run(linear, x[i : i + 1]) for i in range(len(x))])
    threads = _core.num_threads()
    try:
        for count in (1, 2, 3):
            _core.set_num_threads(count)
            for rows in (2, 7, 11, 12, 13, 24, 25, 84, 130):
                assert np.array_equal(run(linear, x[:rows]), alone[:rows]), (count, rows)
    finally:
        _core.set_num_threads(threads)


def test_a_nan_stays_in_its_row() -> None:
    blocks, _ = make_weight(40, 128)
    linear = _core.PackedLinear((blocks, "f8_g"))
    x = make_rows(9, 128)
    clean = run(linear, x)
    x[4, 100] = np.nan
    found = run(linear, x)
    assert np.isnan(found[4]).all()
    assert np.array_equal(np.delete(found, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_are_rounded_by_rows(shape: tuple[int, int]) -> None:
    n, k = shape
    blocks, _ = make_weight(n, k)
    x = np.concatenate([make_rows(30, k), hostile_rows(k)])
    x[29, k // 2] = np.nan
    bias = np.random.default_rng(2).normal(size=n).astype(np.float32)
    numbers, scale = rounded(x)
    plain = run(_core.PackedLinear((blocks, "f8_g")), numbers)
    with np.errstate(over="ignore"):
        theirs = plain * scale
    for b in (None, bias):
        found = run(_core.PackedLinear((blocks, "f8_a8"), b), x)
        assert np.array_equal(found, theirs if b is None else theirs + b, equal_nan=True)
    # The rounding itself: a number moves by a sixteenth of itself at most, or half a step.
    largest = np.abs(x[:29]).max(axis=1, keepdims=True)
    moved = np.abs(numbers[:29] * scale[:29] - x[:29])
    assert (moved <= np.abs(x[:29]) / 16 * 1.0001 + largest / 448 * 2.0**-10).all()


def test_every_number_is_rounded_as_torch_does() -> None:
    """Column i of the result is element i of x: all bfloat16 numbers below rows of largest ones."""
    bits = np.arange(1 << 15, dtype=np.uint32) << 16
    every = bits.view(np.float32)
    every = every[np.isfinite(every)]
    codes = np.zeros((64, 1, 64), np.uint8)
    codes[np.arange(64), 0, np.arange(64)] = 0x38  # 1
    scale = np.ones((64, 1, 1), np.float32).view(np.uint8)
    picks = _core.PackedLinear((np.concatenate([scale, codes], -1).reshape(64, -1), "f8_a8"))
    for largest in (1.0, 1.75, 1.7578125, 448.0, 3.3895314e38, 2.0**-90):
        numbers = every[every <= np.float32(largest)]
        numbers = np.concatenate([numbers, np.zeros(-len(numbers) % 63, np.float32)])
        x = np.empty((len(numbers) // 63, 64), np.float32)
        x[:, :63], x[:, 63] = numbers.reshape(-1, 63), largest
        x[::2] *= -1
        numbers, scale = rounded(x)
        assert np.array_equal(run(picks, x), numbers * scale), largest


def test_a_rounded_row_does_not_depend_on_the_others() -> None:
    blocks, _ = make_weight(100, 576)
    linear = _core.PackedLinear((blocks, "f8_a8"))
    x = make_rows(84, 576)
    x[40, 3] = np.inf
    alone = np.concatenate([run(linear, x[i : i + 1]) for i in range(len(x))])
    assert np.isnan(alone[40]).all() and not np.isnan(np.delete(alone, 40, 0)).any()
    for rows in (2, 13, 84):
        assert np.array_equal(run(linear, x[:rows]), alone[:rows], equal_nan=True), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_rows_of_16_bits(dtype: torch.dtype) -> None:
    """What the caller gives stays as it is."""
    blocks, _ = make_weight(33, 192)
    x = torch.from_numpy(make_rows(5, 192)).to(dtype)
    kept, out = x.clone(), torch.empty(5, 33)
    _core.PackedLinear((blocks, "f8_a8")).run(x, out)
    assert torch.equal(x, kept)
    numbers, scale = rounded(x.bfloat16().float().numpy())
    assert np.array_equal(out.numpy(), run(_core.PackedLinear((blocks, "f8_g")), numbers) * scale)


@pytest.mark.parametrize("where", ["scale", "code"])
def test_what_is_not_finite_is_refused(where: str) -> None:
    blocks, _ = make_weight(40, 128)
    if where == "scale":
        blocks[37, 68:72] = np.array([np.inf], np.float32).view(np.uint8)
    else:
        blocks[37, 131] = 0xFF
    with pytest.raises(ValueError, match=r"row 37 holds a scale or a value in f8_g"):
        _core.PackedLinear((blocks, "f8_g"))


def test_rows_of_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        _core.PackedLinear((np.zeros((4, 100), np.uint8), "f8_g"))


PROGRAM = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from kernels.test_scaled_linear import hostile_rows, make_rows, make_weight, rounded, run
from specdec_ext import _core
blocks, weight = make_weight(33, 576)
codes = np.arange(256, dtype=np.uint8)
codes[codes & 127 == 127] = 0
every = np.concatenate([np.ones((1, 4, 1), np.float32).view(np.uint8), codes.reshape(1, 4, 64)], -1)
linear = _core.PackedLinear((np.repeat(every.reshape(1, -1), 40, 0), "f8_g"))
# Row i of x picks element i: the kernels' widening of every code.
found = run(linear, np.eye(256, dtype=np.float32))
values = np.empty((1, 256), np.float32)
_core.dequantize((every.reshape(1, -1), "f8_g"), values)
assert (found == values[0][:, None]).all(), np.argwhere(found != values[0][:, None])[:5]
x = make_rows(25, 576)
exact = x.astype(np.float64) @ weight.T
size = np.abs(x).astype(np.float64) @ np.abs(weight).T
found = run(_core.PackedLinear((blocks, "f8_g")), x)
assert (np.abs(found - exact) <= size * 320 * 2.0**-24).all()
x = np.concatenate([x, hostile_rows(576)])
numbers, scale = rounded(x)
with np.errstate(over="ignore"):
    theirs = run(_core.PackedLinear((blocks, "f8_g")), numbers) * scale
assert np.array_equal(run(_core.PackedLinear((blocks, "f8_a8")), x), theirs)
print(_core.cpu_isa())
"""


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_widens_every_code(isa: str) -> None:
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(tests=tests)],
        env={**os.environ, "SPECDEC_CPU_ISA": isa}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    if done.stdout.strip() != isa:
        pytest.skip(f"this CPU has no {isa}")
