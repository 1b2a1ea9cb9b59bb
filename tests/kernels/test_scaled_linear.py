"""PackedLinear of e4m3 weights with a scale for 64 elements (f8_g), against float64.

Each weight is a bfloat16 number times its scale, so the products are those of bfloat16; what may
differ from float64 is the rounding of float32 sums.
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
from kernels.test_scaled_linear import make_rows, make_weight, run
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
