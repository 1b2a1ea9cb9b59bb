"""Products whose sums stay in pieces until a norm or the append adds them up: the bits of `out`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cuda_calls import CPU, Target, checked, emulated_device, every_backend
from cuda_pools import make_pool, raw
from kernel_calls import assert_same_bits
from linear_cases import cancelling_layer, make_layer, needs_emulation
from ops_arguments import refused
from packed_cases import make_packed, pack

from specdec_ext import _core, ops

BF16, F16 = torch.bfloat16, torch.float16
# Device, rows, depth. 9.0: two and eight slices. 8.0: two groups of a unit, one group of four, two
# groups of four.
CUTS = [(9, 3, 2048), (9, 20, 8192), (8, 3, 4160), (8, 20, 512), (8, 20, 4160)]
cuts = pytest.mark.parametrize(("major", "rows", "depth"), CUTS, ids=str)
WEIGHTS = ["elements", "q4_0", "f8_a8"]


class Product:
    """A product into an output full of NaN, with scratch that lasts."""

    def __init__(
        self, target: Target, rows: int, columns: int, depth: int, dtype: torch.dtype,
        kind: str = "elements", *, bias: bool = True, scratch_rows: int = 0,
    ) -> None:  # fmt: skip
        self.target = target
        if kind == "elements":
            layer = make_layer(rows, columns, depth, dtype, bias=bias)
            self.weight: Any = target.put(layer.weight)
        else:
            packed = make_packed(rows, columns, depth, dtype, kind, bias=bias)
            layer, self.weight = packed, pack(target, packed)
        self.x = target.put(layer.x)
        self.bias = None if layer.bias is None else target.put(layer.bias)
        self.out = target.put(torch.full((rows, columns), math.nan, dtype=dtype))
        needed = ops.linear_scratch_bytes(
            scratch_rows or rows, columns, self.x.shape[1], dtype,
            format=None if kind == "elements" else kind, backend=target.backend,
        )  # fmt: skip
        self.workspace = target.put(torch.full((needed // 4 + 64,), math.nan))

    def _how(self) -> dict[str, Any]:
        return {
            "out": self.out, "bias": self.bias, "backend": self.target.backend,
            "workspace": self.workspace,
        }  # fmt: skip

    def whole(self) -> torch.Tensor:
        ops.linear(self.x, self.weight, **self._how())
        result = self.out.clone()
        self.out.fill_(math.nan)
        return result

    def left(self) -> Any:
        return ops.linear_sums(self.x, self.weight, **self._how())


def normed(target: Target, x: torch.Tensor, weight: torch.Tensor, **added: Any) -> list[Any]:
    stream, out = x.clone(), torch.full_like(x, math.nan)
    ops.rms_norm(stream, weight, out=out, backend=target.backend, **added)
    return [stream, out]


@pytest.mark.parametrize("kind", WEIGHTS)
@cuts
@checked
def test_a_norm_adds_them_up(target: Target, major: int, rows: int, depth: int, kind: str) -> None:
    needs_emulation(target, major)
    with emulated_device(132, major=major):
        dtype = (BF16, F16)[rows % 2]
        one = Product(target, rows, 64, depth, dtype, kind, bias=depth != 2048)
        added = one.whole()
        assert not added.isnan().any()
        gen = torch.Generator().manual_seed(depth)
        x = target.put(torch.randn(rows, 64, generator=gen).to(dtype))
        weight = target.put(torch.rand(64, generator=gen).to(dtype))
        for how in ({}, {"norm_plus_one": True}):
            sums = one.left()
            assert sums.shape == (rows, 64)
            assert one.out.isnan().all(), "out was written"
            expected = normed(target, x, weight, added=added, **how)
            for got, want in zip(
                normed(target, x, weight, sums=sums, **how), expected, strict=True
            ):
                assert_same_bits(got.cpu(), want.cpu())


@cuts
@checked
def test_the_append_adds_them_up(target: Target, major: int, rows: int, depth: int) -> None:
    """Columns of q, k and v, with norms of heads and without, into pages of either width."""
    needs_emulation(target, major)
    heads, kv_heads, head_dim = 4, 2, 16
    lengths = ([5, 17], [rows - 2, 2])
    dtype = (BF16, F16)[rows % 2]
    with emulated_device(132, major=major):
        one = Product(target, rows, (heads + 2 * kv_heads) * head_dim, depth, dtype)
        fused = one.whole()
        gen = torch.Generator().manual_seed(depth)
        angles = torch.randn(2, 60, head_dim // 2, generator=gen)
        norm = target.put(torch.rand(head_dim, generator=gen).to(dtype))
        positions = torch.tensor([*range(5, 5 + rows - 2), 17, 18], dtype=torch.int32)
        for kv_dtype, norms in (
            (dtype, {}),
            (torch.float8_e4m3fn, {"q_norm": norm, "k_norm": norm}),
        ):
            pool = make_pool(1, 16, head_dim, kv_dtype, lengths, num_kv_heads=kv_heads)
            results = []
            for sums in (None, one.left()):
                # In place, as in a decoder: what is read must not be what is written.
                qkv = fused.clone() if sums is None else torch.full_like(fused, math.nan)
                q, k, v = (
                    part.unflatten(1, (-1, head_dim))
                    for part in qkv.split([n * head_dim for n in (heads, kv_heads, kv_heads)], 1)
                )
                pages = target.put(pool.k.clone()), target.put(pool.v.clone())
                ops.rope_append_kv(
                    q, k, v, *pages, **pool.geometry(target), positions=target.put(positions),
                    q_out=q, cos=target.put(angles[0]), sin=target.put(angles[1]), **norms,
                    sums=sums, backend=target.backend,
                )  # fmt: skip
                results.append((q.cpu(), *(page.cpu() for page in pages)))
            assert not results[1][0].isnan().any()
            for got, want in zip(results[1], results[0], strict=True):
                assert bool((raw(got) == raw(want)).all())


@cuts
@checked
def test_sums_that_cancel(target: Target, major: int, rows: int, depth: int) -> None:
    """Every rounding of the additions shows: their order is that of the product's own."""
    needs_emulation(target, major)
    with emulated_device(132, major=major):
        one = Product(target, rows, 64, depth, BF16, bias=False)
        layer = cancelling_layer(rows, 64, depth, BF16)
        one.x, one.weight, one.bias = target.put(layer.x), target.put(layer.weight), None
        added, weight = one.whole(), target.put(torch.ones(64, dtype=BF16))
        zeros = torch.zeros_like(added)
        got = normed(target, zeros, weight, sums=one.left())
        assert_same_bits(got[0].cpu(), (zeros + added).cpu())
        # A row alone is cut into other units, and added up in the same order.
        x = one.x
        for row in (0, rows - 1):
            one.x, one.out = x[row : row + 1].contiguous(), added[row : row + 1].clone()
            assert_same_bits(one.whole().cpu(), added[row : row + 1].cpu())


@checked
def test_where_nothing_is_cut_or_does_not_fit_out_is_written(target: Target) -> None:
    with emulated_device(132):
        for columns, depth, scratch_rows, kind in (
            (64, 256, 0, "elements"),
            (60, 2048, 0, "elements"),
            (64, 2048, 5, "elements"),
            (64, 2048, 5, "f8_a8"),
        ):
            one = Product(target, 20, columns, depth, BF16, kind, scratch_rows=scratch_rows)
            expected = one.whole()
            assert one.left() is None, (columns, depth, scratch_rows, kind)
            assert_same_bits(one.out.cpu(), expected.cpu())


def test_the_cpu_leaves_none() -> None:
    one = Product(CPU, 3, 64, 4160, BF16)
    expected = one.whole()
    assert one.left() is None
    assert_same_bits(one.out, expected)


@checked
def test_sums_that_do_not_belong_are_refused(target: Target) -> None:
    with emulated_device(132):
        sums = Product(target, 3, 64, 2048, BF16).left()

        def norm(rows: int = 3, columns: int = 64, dtype: torch.dtype = BF16, **more: Any) -> None:
            x = target.put(torch.zeros(rows, columns, dtype=dtype))
            weight = target.put(torch.ones(columns, dtype=dtype))
            more = {"out": x.clone(), "sums": sums, "backend": target.backend} | more
            ops.rms_norm(x, weight, **more)

        norm()
        refused(ValueError, "sums has shape [3, 64]: expected [4, 64]", lambda: norm(4))
        refused(ValueError, "sums has shape [3, 64]: expected [3, 72]", lambda: norm(3, 72))
        refused(ValueError, "sums is of bfloat16: the call is of float16", lambda: norm(dtype=F16))
        both = target.put(torch.zeros(3, 64, dtype=BF16))
        refused(ValueError, "added and sums are given: give one", lambda: norm(added=both))
        refused(
            ValueError, "added_weight is given: it needs added", lambda: norm(added_weight=both[0])
        )
        if target.device == "cpu":
            refused(
                ValueError,
                'the call of "cpu": use one for both',
                lambda: norm(backend="cpu"),
            )
        x = target.put(torch.zeros(3, 64, dtype=BF16))
        refused(
            ValueError,
            "out is x: with sums",
            lambda: ops.rms_norm(x, x[0], out=x, sums=sums, backend=target.backend),
        )
    with pytest.raises(TypeError):
        _core.rms_norm(x, x[0], out=x.clone(), sums=3, backend=target.backend)


@every_backend
def test_empty_products_leave_none(target: Target) -> None:
    one = Product(target, 1, 64, 2048, BF16)
    one.x, one.out = one.x[:0], one.out[:0]
    assert one.left() is None
