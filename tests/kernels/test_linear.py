"""PackedLinear against float64, and its bits against themselves.

The error of every element is at most twice the largest of torch's on the same inputs, plus a few
roundings of the sum. Row invariance is compared bit for bit, in every instruction set this machine
has.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from specdec_ext import _core

ISAS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(n, k) for n in (1, 31, 33, 100) for k in (1, 7, 63, 576)] + [
    (32, 2), (64, 1536), (960, 576), (17, 4097), (192, 3000)
]  # fmt: skip
ROWS = (*range(1, 41), 84, 127, 257, 300)  # 257: a block of 256 rows and one row alone
EPS = 2.0**-24


def make(n: int, k: int, dtype: torch.dtype, rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed * 7919 + n * 131 + k)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    return weight, bias, x


def run(linear: _core.PackedLinear, x: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    out = torch.full((x.shape[0], linear.out_features), float("nan"), dtype=dtype)
    linear.run(x, out)
    return out


def check_values(weight, bias, x) -> None:
    linear = _core.PackedLinear(weight, bias)
    got = run(linear, x).double()
    exact = x.double() @ weight.double().T + bias.double()
    # A fair rival: torch on the same rounded inputs, in float32 where sums are kept in float32.
    inputs = x.to(weight.dtype).float() if weight.dtype == torch.bfloat16 else x.float()
    rival = torch.nn.functional.linear(inputs, weight.float(), bias.float()).double()
    error, allowed = (got - exact).abs(), 2 * (rival - exact).abs().max()
    rounding = EPS * (exact.abs() + (x.double().abs() @ weight.double().abs().T) / 4)
    assert bool((error <= allowed + rounding).all()), (error - rounding).max() / allowed
    # The bias is added behind the chain: without it the same chain.
    assert torch.equal(run(_core.PackedLinear(weight), x) + bias.float(), run(linear, x))


def check_bits(weight, bias, x) -> None:
    linear = _core.PackedLinear(weight, bias)
    rows = torch.cat([run(linear, x[i : i + 1]) for i in range(x.shape[0])])
    for count in (r for r in ROWS if r <= x.shape[0]):
        for first in {0, x.shape[0] - count}:
            got = run(linear, x[first : first + count])
            assert torch.equal(got, rows[first : first + count]), (count, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, dtype) -> None:
    check_values(*make(*shape, dtype, rows=29))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 63), (100, 576), (64, 1536), (192, 3000)], ids=str)
def test_bits_do_not_depend_on_rows(shape, dtype) -> None:
    # K = 3000 in fp32 is more than one cache block, so long blocks resume their chains.
    check_bits(*make(*shape, dtype, rows=300))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_integers_are_exact(dtype) -> None:
    """Sums of small integers have no rounding: every product must be there exactly once."""
    generator = torch.Generator().manual_seed(3)
    for n, k in SHAPES:
        weight = torch.randint(-2, 3, (n, k), generator=generator).to(dtype)
        x = torch.randint(-2, 3, (13, k), generator=generator).to(dtype)
        assert torch.equal(run(_core.PackedLinear(weight), x), x.float() @ weight.float().T)


@pytest.mark.parametrize(
    "in_dtype,weight_dtype,out_dtype", list(itertools.product(DTYPES, repeat=3))
)
def test_mixed_dtypes_and_strides(in_dtype, weight_dtype, out_dtype) -> None:
    weight, bias, x = make(45, 77, weight_dtype, rows=600)
    wide_x = torch.full((600, 80), float("nan"), dtype=in_dtype)
    wide_x[:, :77] = x.to(in_dtype)
    wide_out = torch.full((600, 50), 5.0, dtype=out_dtype)
    linear = _core.PackedLinear(weight, bias)
    linear.run(wide_x[:, :77], wide_out[:, :45])
    seen = wide_x[:, :77].to(torch.bfloat16 if weight_dtype == torch.bfloat16 else torch.float32)
    expected = run(linear, seen.float())
    assert torch.equal(wide_out[:, :45], expected.to(out_dtype))
    assert bool((wide_out[:, 45:] == 5.0).all()), "wrote beside the output"
    assert torch.equal(run(linear, seen[:1].to(in_dtype)), expected[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype) -> None:
    weight, bias, x = make(40, 9, dtype, rows=3)
    weight[5, 2], weight[7, 0], x[2, 4] = float("inf"), float("nan"), float("-inf")
    got = run(_core.PackedLinear(weight, bias), x)
    expected = x.double() @ weight.double().T + bias.double()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_value_survives_packing(dtype) -> None:
    """Weights that are all 65536 bit patterns, times one: the conversion in the kernel is exact."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    weight = bits.view(dtype).reshape(-1, 1)
    got = run(_core.PackedLinear(weight), torch.ones(1, 1)).flatten()
    expected = weight.float().flatten()
    if dtype == torch.bfloat16:  # the dot-product instruction flushes subnormals, by definition
        small = expected.abs() < torch.finfo(torch.bfloat16).tiny
        assert bool((got[small].abs() < torch.finfo(torch.bfloat16).tiny).all())
        got, expected = got[~small], expected[~small]
    assert torch.equal(got.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(got[finite], expected[finite])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_rounding_is_torch_rounding(dtype) -> None:
    """Random float32 patterns through the output conversion: subnormals, ties, overflow."""
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    ties = (torch.arange(0, 2**15, dtype=torch.int64) * 2**16 + 2**15).to(torch.int32)
    half_ties = (torch.arange(0x33000000, 0x47800000, 0x1000, dtype=torch.int64)).to(torch.int32)
    values = torch.cat([bits, ties, half_ties]).view(torch.float32)
    values = values[(values.abs() >= torch.finfo(torch.float32).tiny)]
    got = run(_core.PackedLinear(values.reshape(-1, 1)), torch.ones(1, 1), dtype).flatten()
    expected = values.to(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~got.isnan()])


def test_weight_bytes_and_shape() -> None:
    linear = _core.PackedLinear(torch.zeros(33, 7, dtype=torch.bfloat16), torch.zeros(33))
    assert (linear.out_features, linear.in_features, linear.dtype) == (33, 7, "bfloat16")
    assert linear.weight_bytes == 64 * 8 * 2 + 64 * 4  # padded to panels of 32 and pairs of k


def test_non_contiguous_rows_of_the_weight() -> None:
    wide = torch.randn(40, 90)
    x = torch.randn(5, 70)
    narrow = wide[:, 10:80]
    assert torch.equal(
        run(_core.PackedLinear(narrow), x), run(_core.PackedLinear(narrow.contiguous()), x)
    )


def test_zero_rows() -> None:
    assert run(_core.PackedLinear(torch.zeros(3, 4)), torch.zeros(0, 4)).shape == (0, 3)


def test_errors() -> None:
    linear = _core.PackedLinear(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="x"):
        linear.run(torch.zeros(2, 5), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="out"):
        linear.run(torch.zeros(2, 4), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="contiguous"):
        linear.run(torch.zeros(4, 2).T, torch.zeros(2, 3))
    # Else 2^40 rows would be computed, all into one place.
    one = torch.zeros(1, 4), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="out has rows of 3 elements, 0 apart"):
        linear.run(*(row.expand(2**40, -1) for row in one))
    linear.run(one[0].expand(5, -1), torch.zeros(5, 3))  # rows that are read may be the same
    with pytest.raises(TypeError, match="weight"):
        _core.PackedLinear(torch.zeros(3, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="2: \\[N, K\\]"):
        _core.PackedLinear(torch.zeros(3))
    with pytest.raises(ValueError, match="biases"):
        _core.PackedLinear(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(ValueError, match="contiguous"):
        _core.PackedLinear(torch.zeros(4, 3).T)


# -- Instruction sets: other processes, because one is chosen once. --------------------------------


def child_main(out_path: str) -> None:
    """Checks values and bits here, and stores results by number of threads."""
    results = {}
    for threads in (1, 2, 5):  # 5 ranks over 4 panels: one has nothing to do
        _core.set_num_threads(threads)
        results[threads] = []
        for dtype in DTYPES:
            for shape in ((33, 63), (100, 577), (192, 3000)):
                arguments = make(*shape, dtype, rows=40)
                check_values(*arguments)
                check_bits(*arguments)
                results[threads].append(run(_core.PackedLinear(*arguments[:2]), arguments[2]))
    torch.save((_core.cpu_isa(), results), out_path)


@pytest.mark.parametrize("isa", ISAS)
def test_every_isa_and_thread_count(isa, tmp_path) -> None:
    out = tmp_path / "results.pt"
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_linear; "
    subprocess.run(
        [sys.executable, "-c", code + f"test_linear.child_main({str(out)!r})"],
        env={**os.environ, "SPECDEC_CPU_ISA": isa},
        check=True,
    )
    ran, results = torch.load(out)
    if ran != isa:
        pytest.skip(f"this CPU has no {isa}")
    one = results.pop(1)
    for other in results.values():
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


AMX_PROGRAM = """
import numpy as np, torch
from specdec_ext import _core
print(_core.cpu_isa())
if _core.cpu_isa() != "amx":
    raise SystemExit
draws = torch.Generator().manual_seed(3)
for n, k, rows in ((32, 32, 1), (40, 600, 33), (33, 3001, 17), (64, 577, 70)):
    w = torch.randn(n, k, generator=draws).to(torch.bfloat16)
    x = torch.randn(rows, k, generator=draws).to(torch.bfloat16)
    found = torch.full((rows, n), float("nan"))
    _core.PackedLinear(w).run(x, found)
    ws, xs = (np.zeros((len(m), -(-k // 32) * 32), np.float32) for m in (w, x))
    ws[:, :k], xs[:, :k] = w.float(), x.float()
    total = np.zeros((rows, n), np.float32)
    for chain in range(0, ws.shape[1], 1024):
        sums = np.zeros((rows, n), np.float32)
        for block in range(chain, min(chain + 1024, ws.shape[1]), 32):
            halves = np.zeros((2, rows, n), np.float32)
            for at in range(block, block + 32):
                halves[at % 2] += xs[:, at, None] * ws[None, :, at]
            sums += halves[0] + halves[1]
        total = total + sums if chain else sums
    assert np.array_equal(total, found), (n, k, rows)
"""


def test_the_sum_of_tiles_is_the_documented_one() -> None:
    """docs/kernels/cpu_linear.md, AMX: the order of every addition, in float32."""
    done = subprocess.run([sys.executable, "-c", AMX_PROGRAM], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    if done.stdout.strip() != "amx":
        pytest.skip("this CPU has no amx")


def test_unknown_isa_is_refused() -> None:
    code = "from specdec_ext import _core; _core.cpu_isa()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SPECDEC_CPU_ISA": "avx1024"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "SPECDEC_CPU_ISA = 'avx1024'" in result.stderr
