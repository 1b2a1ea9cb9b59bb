"""Calls of ops.linear whose surroundings are poisoned, and what they have to give."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cuda_calls import Target
from kernel_calls import bits

from specdec_ext import ops


@dataclasses.dataclass(frozen=True)
class Layer:
    """x [R, K], weight [N, K], bias [N] or None, on the CPU."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def rows(self, which: slice | list[int]) -> Layer:
        return dataclasses.replace(self, x=self.x[which])


both_families = pytest.mark.usefixtures("family")  # of conftest.py


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def needs_emulation(target: Target, major: int) -> None:
    """Skips what is asked of another device than the one that is there."""
    if target.backend == "cuda" and torch.cuda.get_device_capability()[0] != major:
        pytest.skip(f"a device of {major}.0 is wanted, and emulated where it is not")


def make_layer(
    rows: int, columns: int, depth: int, dtype: torch.dtype, *, bias: bool = True, seed: int = 1
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator)
    x *= torch.tensor([1.0, 1e-2, 30.0])[torch.arange(rows) % 3][:, None]
    weight = torch.randn(columns, depth, generator=generator) / math.sqrt(depth)
    addend = torch.randn(columns, generator=generator).to(dtype) if bias else None
    return Layer(x.to(dtype), weight.to(dtype), addend)


def cancelling_layer(rows: int, columns: int, depth: int, dtype: torch.dtype) -> Layer:
    """Products that cancel in pairs, wherever these stand: a result is nothing but the rounding of
    its sums, so that sums in another order have other bits, which a short mantissa mostly hides."""
    layer = make_layer(rows, columns, depth, dtype, bias=False)
    order = torch.randperm(depth, generator=torch.Generator().manual_seed(7))
    half = depth // 2
    layer.x[:, order[half : 2 * half]] = layer.x[:, order[:half]]
    layer.weight[:, order[half : 2 * half]] = -layer.weight[:, order[:half]]
    return layer


def inside(
    target: Target, values: torch.Tensor, shift: int = 8, fill: float = math.nan
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix within a larger one of NaN, and that one; 16 bytes aligned if shift is 8 or 0."""
    rows, columns = values.shape
    pitch = -(-columns // 8) * 8 + 16
    whole = target.put(torch.full((rows + 2, pitch), fill, dtype=values.dtype))
    view = whole[1 : rows + 1, shift : shift + columns]
    view.copy_(values)
    return view, whole


def call(
    target: Target,
    x: torch.Tensor,
    weight: torch.Tensor | ops.PackedWeight,
    bias: torch.Tensor | None,
    *,
    x_shift: int = 8,
    out_shift: int = 8,
    aside: bool = True,
) -> torch.Tensor:
    """What ops.linear gives; around x, out and in the scratch is NaN or a mark that has to stay."""
    near, _ = inside(target, x, x_shift)
    empty = torch.full((len(x), weight.shape[0]), 7.0, dtype=x.dtype)
    out, whole = inside(target, empty, out_shift, fill=5.0)

    def scratch(num_bytes: int) -> torch.Tensor:
        return target.put(torch.full((num_bytes // 4 + 64,), math.nan))

    result = ops.linear(
        near,
        weight,
        out=out,
        bias=None if bias is None else target.put(bias),
        constant_weight=aside,
        backend=target.backend,
        workspace=scratch,
    )
    assert result is out
    values = out.cpu().clone()
    out.fill_(5.0)
    assert bool((whole == 5.0).all()), "written beside out"
    return values


def run(
    target: Target, layer: Layer, *, shifts: tuple[int, int, int] = (8, 8, 8), aside: bool = True
) -> torch.Tensor:
    """The call's result. Where x, weight and out begin: shifts."""
    weight, _ = inside(target, layer.weight, shifts[1])
    return call(
        target, layer.x, weight, layer.bias, x_shift=shifts[0], out_shift=shifts[2], aside=aside
    )


def exact(layer: Layer) -> torch.Tensor:
    product = layer.x.double() @ layer.weight.double().t()
    return product if layer.bias is None else product + layer.bias.double()


def check_error(layer: Layer, result: torch.Tensor) -> None:
    """At most twice the error of torch in the same dtype, and what float32 sums may differ by."""
    expected = exact(layer)
    theirs = torch.nn.functional.linear(layer.x, layer.weight, layer.bias)
    size = layer.x.double().abs() @ layer.weight.double().abs().t()
    limit = 2 * (theirs.double() - expected).abs().max() + 2.0**-22 * size
    assert bool(((result.double() - expected).abs() <= limit).all())
    # Element by element: half a unit of the dtype, and float32 chains of at most 1024 products.
    unit = torch.finfo(layer.x.dtype).eps / 2
    chains = 2.0**-24 * math.sqrt(layer.x.shape[1]) * 8 * size
    bound = unit * 1.01 * expected.abs() + chains + torch.finfo(layer.x.dtype).tiny
    assert bool(((result.double() - expected).abs() <= bound).all())
