"""PackedLinear of block formats against NumPy, bit for bit.

The sums of whole numbers are exact and the rest has one order, so the reference, every instruction
set, every number of rows and of threads give the same bits. That the result is also *good* is
measured against float64.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from reference.quant_reference import (
    FORMATS,
    OWN_FORMATS,
    quant_linear,
    quantize_rows,
    read_groups,
)
from specdec_ext import _core

ALL_FORMATS = FORMATS | OWN_FORMATS
NAMES = tuple(ALL_FORMATS)
ISAS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")
THREADS = (1, 5)
SHAPES = [(1, 256), (31, 512), (33, 256), (96, 768), (100, 1536)]
# Where a block's scales lie, and what they are.
SCALES = {
    "q8_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "q4_g": (0, 4),
    "q8_g": (0,),
}


def scale_type(name: str) -> type[np.floating]:
    return np.float32 if name in OWN_FORMATS else np.float16


def put_scales(name: str, blocks: np.ndarray, at: int, values: np.ndarray) -> None:
    """values [...]: of each block of uint8 [..., bytes of a block]."""
    data = np.ascontiguousarray(values, scale_type(name))[..., None].view(np.uint8)
    blocks[..., at : at + data.shape[-1]] = data


def make_blocks(name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random bytes for codes and small scales; scales of all kinds, none infinite."""
    rng = np.random.default_rng([seed, n, k, NAMES.index(name)])
    elements, size = ALL_FORMATS[name]
    blocks = rng.integers(0, 256, (n, k // elements, size), dtype=np.uint8)
    for at in SCALES[name]:
        scale = rng.normal(0, 0.02, blocks.shape[:2])
        kind = rng.integers(0, 40, blocks.shape[:2])
        scale = np.where(kind == 0, 0.0, np.where(kind == 1, 6e-8, np.where(kind == 2, 9e3, scale)))
        put_scales(name, blocks, at, scale)
    return blocks.reshape(n, -1)


def make_rows(rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows of every magnitude, some groups all zero."""
    rng = np.random.default_rng([seed, rows, k])
    x = rng.normal(size=(rows, k)) * 10.0 ** rng.integers(-3, 3, (rows, 1))
    x[rng.random((rows, k)) < 0.01] *= 100
    x.reshape(rows, -1, 32)[rng.random((rows, k // 32)) < 0.05] = 0
    return x.astype(np.float32)


def packed(name: str, blocks: np.ndarray, bias: np.ndarray | None = None) -> _core.PackedLinear:
    return _core.PackedLinear((blocks, name), bias)


def run(linear: _core.PackedLinear, x: np.ndarray, fast: bool = False) -> np.ndarray:
    out = np.full((len(x), linear.out_features), np.nan, np.float32)
    linear.run(x, out, fast)
    return out


@pytest.mark.parametrize("name", tuple(FORMATS))
def test_elements_are_those_of_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    blocks = make_blocks(name, 37, 768)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(read_groups(name, blocks).values(), expected)
    values = np.empty((37, 768), np.float32)
    _core.dequantize((blocks, name), values)
    assert np.array_equal(values, expected)
    rows = np.empty((37, 768), np.float32)
    packed(name, blocks).unpack_rows(np.arange(37, dtype=np.int32), rows)
    assert np.array_equal(rows, expected), "a pack loses nothing"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_the_reference(name: str, shape: tuple[int, int]) -> None:
    blocks, x = make_blocks(name, *shape), make_rows(35, shape[1])
    bias = np.random.default_rng(1).normal(size=shape[0]).astype(np.float32)
    groups = read_groups(name, blocks)
    assert np.array_equal(run(packed(name, blocks), x), quant_linear(groups, x, None))
    assert np.array_equal(run(packed(name, blocks, bias), x), quant_linear(groups, x, bias))


@pytest.mark.parametrize("name", NAMES)
def test_error_is_that_of_rounding_the_rows(name: str) -> None:
    """Each element of x is off by at most half a step; float32 sums add a few roundings."""
    blocks, x = make_blocks(name, 64, 1536, seed=2), make_rows(9, 1536, seed=2)
    weight = read_groups(name, blocks).values().astype(np.float64)
    exact = x.astype(np.float64) @ weight.T
    (_, scale), (_, second) = quantize_rows(x)
    assert 0.01 < (second > 0).mean() < 0.5
    steps = np.repeat(np.where(second > 0, second, scale).astype(np.float64) / 2, 32, axis=1)
    allowed = steps @ np.abs(weight).T
    slack = 2.0**-20 * (np.abs(x.astype(np.float64)) @ np.abs(weight).T)
    error = np.abs(run(packed(name, blocks), x) - exact)
    assert (error <= allowed + slack).all()
    assert error.max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_rows(name: str) -> None:
    linear, x = packed(name, make_blocks(name, 100, 512)), make_rows(300, 512)
    alone = np.concatenate([run(linear, x[i : i + 1]) for i in range(300)])
    for count in (*range(2, 41), 64, 84, 127, 128, 300):
        for first in {0, 300 - count}:
            got = run(linear, x[first : first + count])
            assert np.array_equal(got, alone[first : first + count]), (count, first)


# A tile of each height, several, and a block of 256 rows with one behind it.
FAST_ROWS = (*range(14, 41), 64, 84, 127, 256, 257, 300)


def in_bfloat16(name: str, blocks: np.ndarray, bias: np.ndarray | None) -> _core.PackedLinear:
    """The linear layer of the elements, rounded."""
    values = torch.from_numpy(read_groups(name, blocks).values())
    return _core.PackedLinear(values.to(torch.bfloat16), bias)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_many_rows_in_the_fast_form_are_those_of_bfloat16(
    name: str, shape: tuple[int, int]
) -> None:
    """On processors with tiles; on others, and for few rows, nothing changes."""
    blocks, x = make_blocks(name, *shape), make_rows(300, shape[1])
    bias = np.random.default_rng(1).normal(size=shape[0]).astype(np.float32)
    linear = packed(name, blocks, bias)
    exact, wide = run(linear, x), run(in_bfloat16(name, blocks, bias), x)
    assert (linear.many_rows > 0) == (_core.cpu_isa() == "amx")
    for count in FAST_ROWS:
        is_many = 0 < linear.many_rows <= count
        for first in {0, 300 - count}:
            rows = slice(first, first + count)
            expected = (wide if is_many else exact)[rows]
            assert np.array_equal(run(linear, x[rows], fast=True), expected), (count, first)
    assert not np.array_equal(exact, wide)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_rows_stay_alone_in_the_fast_form(name: str) -> None:
    linear, x = packed(name, make_blocks(name, 40, 512)), make_rows(40, 512)
    clean = run(linear, x, fast=True)
    x[1, 3], x[4, 400], x[36, 0] = np.nan, np.inf, -np.inf
    got = run(linear, x, fast=True)
    assert not np.isfinite(got[[1, 4, 36]]).any()
    kept = [row for row in range(40) if row not in (1, 4, 36)]
    assert np.array_equal(got[kept], clean[kept])


def extreme_blocks(name: str, code: int) -> np.ndarray:
    """[40, 512]: every byte of codes is `code`, every scale 0.5."""
    elements, size = ALL_FORMATS[name]
    blocks = np.full((40, 512 // elements, size), code, np.uint8)
    for at in SCALES[name]:
        put_scales(name, blocks, at, np.full(blocks.shape[:2], 0.5))
    return blocks.reshape(40, -1)


def extreme_rows() -> np.ndarray:
    """[4, 512]: rounded, they are 127 or -127 throughout."""
    x = np.ones((4, 512), np.float32)
    x[1], x[2, ::2], x[3, 1::2] = -1, -1, -1
    return x


EXTREME_CODES = (0x00, 0x80, 0x7F, 0xFF)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q6_k"])
def test_rows_pass_over_several_blocks_of_panels(name: str) -> None:
    """Nine panels of 37 to 82 KB: more than the second-level cache is given at a time."""
    blocks = make_blocks(name, 270, 2048)
    x = make_rows(50, 2048)
    linear = packed(name, blocks)
    alone = np.concatenate([run(linear, x[i : i + 1]) for i in range(50)])
    assert np.array_equal(alone[:3], quant_linear(read_groups(name, blocks), x[:3], None))
    for count in (32, 33, 45, 46, 50):
        assert np.array_equal(run(linear, x[:count]), alone[:count]), count


@pytest.mark.parametrize("name", NAMES)
def test_extreme_codes_do_not_saturate(name: str) -> None:
    """All codes at either end, all x at either end: sums of pairs leave 16 bits if they are let."""
    for code in EXTREME_CODES:
        blocks = extreme_blocks(name, code)
        expected = quant_linear(read_groups(name, blocks), extreme_rows(), None)
        assert np.array_equal(run(packed(name, blocks), extreme_rows()), expected)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_rows_stay_alone(name: str) -> None:
    linear, x = packed(name, make_blocks(name, 40, 512)), make_rows(12, 512)
    clean = run(linear, x)
    x[1, 3], x[4, 400], x[6, 0] = np.nan, np.inf, -np.inf
    x[8], x[9], x[10, :32] = 1e25, 1e-42, 1e-31
    got = run(linear, x)
    assert np.isnan(got[[1, 4, 6]]).all()
    assert (run(linear, np.zeros((1, 512), np.float32)) == 0).all()
    assert np.array_equal(got[9], np.zeros(40)), "a row of subnormals counts as zero"
    kept = [0, 2, 3, 5, 7, 11]
    assert np.array_equal(got[kept], clean[kept])
    expected = quant_linear(read_groups(name, make_blocks(name, 40, 512)), x[[8, 10]], None)
    assert np.array_equal(got[[8, 10]], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_other_dtypes_are_widened(dtype: torch.dtype) -> None:
    linear = packed("q4_1", make_blocks("q4_1", 33, 256))
    x = torch.from_numpy(make_rows(300, 256)).to(dtype)
    out = torch.empty(300, 33, dtype=dtype)
    linear.run(x, out)
    assert torch.equal(out, torch.from_numpy(run(linear, x.float().numpy())).to(dtype))


def test_refusals_name_value_and_limit() -> None:
    blocks = make_blocks("q4_0", 3, 64)
    with pytest.raises(ValueError, match="weight type 'q3_k': give q8_0, q4_0"):
        _core.PackedLinear((blocks, "q3_k"))
    with pytest.raises(ValueError, match="whole blocks"):
        _core.PackedLinear((blocks[:, :35].copy(), "q4_0"))
    with pytest.raises(TypeError, match="uint8"):
        _core.PackedLinear((blocks.view(np.int8).astype(np.int32), "q4_0"))
    with pytest.raises(TypeError, match="name of its format"):
        _core.PackedLinear((blocks, 4))
    for value in (np.inf, np.nan):
        bad = blocks.copy()
        bad[2, 18:20] = np.array([value], np.float16).view(np.uint8)
        with pytest.raises(ValueError, match=r"row 2 holds a scale in q4_0 that is not finite"):
            _core.PackedLinear((bad, "q4_0"))
    with pytest.raises(ValueError, match=r"out has shape \[3, 63\]"):
        _core.dequantize((blocks, "q4_0"), np.empty((3, 63), np.float32))


# -- Instruction sets: other processes, because one is chosen once. --------------------------------


def child_main(out_path: str) -> None:
    """Stores results for a comparison with another process's."""
    results = {}
    for threads in THREADS:
        _core.set_num_threads(threads)
        for name in NAMES:
            for n, k in SHAPES:
                for fast in (False, True):
                    results[f"{threads}-{name}-{n}-{k}-{fast}"] = run(
                        packed(name, make_blocks(name, n, k)), make_rows(40, k), fast
                    )
            for code in EXTREME_CODES:
                extreme = run(packed(name, extreme_blocks(name, code)), extreme_rows())
                results[f"{threads}-{name}-extreme-{code}"] = extreme
    np.savez(out_path, isa=_core.cpu_isa(), **results)


@pytest.mark.parametrize("isa", ISAS)
def test_every_isa_gives_the_same_bits(isa: str, tmp_path) -> None:
    folder = os.path.dirname(__file__)
    tests = os.path.dirname(folder)
    code = f"import sys; sys.path[:0] = [{folder!r}, {tests!r}]; import test_quant_linear as t; "
    out = tmp_path / "results.npz"
    subprocess.run(
        [sys.executable, "-c", code + f"t.child_main({str(out)!r})"],
        env={**os.environ, "SPECDEC_CPU_ISA": isa},
        check=True,
    )
    with np.load(out) as archive:
        stored = dict(archive)
    if stored["isa"] != isa:
        pytest.skip(f"this CPU has no {isa}")
    for name in NAMES:
        for n, k in SHAPES:
            for fast in (False, True):
                # The fast form is another one with tiles alone.
                if fast and isa == "amx" != _core.cpu_isa():
                    continue
                linear = packed(name, make_blocks(name, n, k))
                expected = run(linear, make_rows(40, k), fast and isa == "amx")
                for threads in THREADS:
                    found = stored[f"{threads}-{name}-{n}-{k}-{fast}"]
                    assert np.array_equal(found, expected), (threads, name, n, k, fast)
        for code in EXTREME_CODES:
            expected = run(packed(name, extreme_blocks(name, code)), extreme_rows())
            for threads in THREADS:
                found = stored[f"{threads}-{name}-extreme-{code}"]
                assert np.array_equal(found, expected), (threads, name, code)
