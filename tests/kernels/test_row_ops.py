"""RMSNorm with its addition, and the gated activation, against float64, on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_calls import Target, every_backend
from kernel_calls import bits
from ops_arguments import refused
from transformers.models.gemma2.modeling_gemma2 import Gemma2Config, Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from specdec_ext import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One vector, cut vectors, several threads, several vectors a thread, more than it keeps.
COLUMNS = [1, 8, 100, 576, 4096, 20008]
ROWS = 5
EPS = 1e-5


def random_rows(columns: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, columns, generator=generator) * scale
    rows *= torch.tensor([1.0, 1e-3, 30.0, 0.0, 1.0])[:, None]
    return rows.to(dtype)


def inside(target: Target, rows: torch.Tensor, shift: int = 1) -> torch.Tensor:
    """The rows within wider ones of NaN, aligned to nothing unless shift is 0."""
    wide = torch.full((len(rows), rows.shape[1] + 8), math.nan, dtype=rows.dtype)
    there = target.put(wide)[:, shift : shift + rows.shape[1]]
    there.copy_(rows)
    return there


def exact_norm(x: torch.Tensor, weight: torch.Tensor, plus_one: bool) -> torch.Tensor:
    wide = x.double()
    factor = weight.double() + float(plus_one)
    return wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * factor


def tolerance(dtype: torch.dtype, roundings: int) -> dict[str, float]:
    """Each rounding to the dtype errs by half its eps; float32 within by a few times its own."""
    unit = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).tiny
    return {"rtol": roundings * unit * 1.02 + 2.0**-20, "atol": smallest}


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
@every_backend
def test_rms_norm(target: Target, dtype: torch.dtype, columns: int, plus_one: bool) -> None:
    x, weight = random_rows(columns, dtype, 1), random_rows(columns, dtype, 2)[0].contiguous()
    for shift in (0, 1):
        there, out = inside(target, x, shift), inside(target, torch.zeros_like(x), shift)
        options: dict[str, Any] = {"eps": EPS, "norm_plus_one": plus_one, "backend": target.backend}
        assert ops.rms_norm(there, target.put(weight), out=out, **options) is out
        expected = exact_norm(x, weight, plus_one)
        # 1 + w is rounded to float32, which matters where it is near zero.
        bound = tolerance(dtype, 2)
        torch.testing.assert_close(out.cpu().double(), expected, **bound)
        assert torch.equal(there.cpu(), x)
        ops.rms_norm(there, target.put(weight), out=there, **options)  # in place
        assert torch.equal(bits(there.cpu()), bits(out.cpu()))


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("columns", [8, 100, 4096, 20008])
@pytest.mark.parametrize("dtype", DTYPES)
@every_backend
def test_the_addition_before_it(
    target: Target, dtype: torch.dtype, columns: int, sandwich: bool
) -> None:
    x, added = random_rows(columns, dtype, 1), random_rows(columns, dtype, 3)
    weight, other = (random_rows(columns, dtype, seed)[0].contiguous() for seed in (2, 4))
    # Which of them begins at no multiple of 16 bytes: one alone, where rows are short.
    alone = [(1, 0, 0), (0, 1, 0), (0, 0, 1)] if columns == 8 else []
    for shifts in [(0, 0, 0), *alone]:
        check_addition(target, x, added, weight, other if sandwich else None, shifts)


def check_addition(
    target: Target,
    x: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    other: torch.Tensor | None,
    shifts: tuple[int, int, int],
) -> None:
    dtype, sandwich = x.dtype, other is not None
    there, addend = inside(target, x, shifts[0]), inside(target, added, shifts[1])
    out = inside(target, torch.zeros_like(x), shifts[2])
    ops.rms_norm(
        there, target.put(weight), out=out, added=addend, eps=EPS, norm_plus_one=sandwich,
        added_weight=None if other is None else target.put(other), backend=target.backend,
    )  # fmt: skip
    stored = there.cpu()
    if other is not None:
        normed = exact_norm(added, other, True)
        size = (x.double().abs() + normed.abs()).clamp_min(1e-30)
        error = (stored.double() - (x.double() + normed)).abs() / size
        assert error.max() <= tolerance(dtype, 2)["rtol"]
    else:
        assert torch.equal(stored, x + added)
    # What is normalised is what was stored.
    expected = exact_norm(stored, weight, sandwich)
    torch.testing.assert_close(out.cpu().double(), expected, **tolerance(dtype, 2))
    assert torch.equal(addend.cpu(), added)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("columns", [1, 8, 100, 1432])
@pytest.mark.parametrize("dtype", DTYPES)
@every_backend
def test_gated_activation(
    target: Target, dtype: torch.dtype, columns: int, activation: str
) -> None:
    both = torch.cat([random_rows(columns, dtype, 5), random_rows(columns, dtype, 6)], dim=1)
    x, factor = both.double().chunk(2, dim=1)
    if activation == "silu":
        active = x / (1 + torch.exp(-x))
    else:
        active = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    for shift in (0, 1):
        out = inside(target, torch.zeros(ROWS, columns, dtype=dtype), shift)
        there = inside(target, both, shift)
        result = ops.gated_activation(there, out=out, activation=activation, backend=target.backend)
        assert result is out
        # Where 1 + tanh cancels, its float32 error is that of 1; a tiny value is rounded up to
        # the smallest step of the dtype, then multiplied.
        limits = tolerance(dtype, 2)
        slack = (x * factor).abs() * 2.0**-23 + torch.finfo(dtype).tiny * (1 + factor.abs())
        error = (out.cpu().double() - active * factor).abs()
        assert bool((error <= limits["rtol"] * (active * factor).abs() + slack).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_backend
def test_it_rounds_as_transformers_does(target: Target, dtype: torch.dtype) -> None:
    """Equal bits, but where the float32 sum of a row comes out another way."""
    columns = 512
    x, added = random_rows(columns, dtype, 1)[[0, 2, 4]], random_rows(columns, dtype, 3)[[0, 2, 4]]
    weight = random_rows(columns, dtype, 2)[0].contiguous()

    def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert (bits(ours.cpu()) == bits(theirs)).float().mean() > 0.99

    for plus_one, kind in ((False, LlamaRMSNorm), (True, Gemma2RMSNorm)):
        module = kind(columns, eps=EPS)
        module.weight.data = weight
        there, out = target.put(x.clone()), target.put(torch.zeros_like(x))
        ops.rms_norm(
            there, target.put(weight), out=out, added=target.put(added), eps=EPS,
            norm_plus_one=plus_one, backend=target.backend,
        )  # fmt: skip
        agree(out, module(x + added).detach())
    sizes = {"hidden_size": columns, "intermediate_size": 2 * columns}
    modules: list[tuple[str, Any]] = [
        ("silu", LlamaMLP(LlamaConfig(**sizes))),
        ("gelu_tanh", Gemma2MLP(Gemma2Config(**sizes))),
    ]
    for activation, mlp in modules:
        both = torch.cat([x, added], dim=1)
        out = target.put(torch.zeros_like(x))
        ops.gated_activation(
            target.put(both), out=out, activation=activation, backend=target.backend
        )
        agree(out, mlp.act_fn(x) * added)


@every_backend
def test_a_row_depends_on_itself_alone(target: Target) -> None:
    """The same bits in any company; a NaN or an infinity stays in its row."""
    x = random_rows(576, torch.bfloat16, 1)
    weight = target.put(torch.ones(576, dtype=torch.bfloat16))
    spoilt = x.clone()
    spoilt[1, 5], spoilt[3, 7] = math.nan, math.inf

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        there = target.put(rows.clone())
        normed = ops.rms_norm(there, weight, out=torch.empty_like(there), backend=target.backend)
        half = torch.empty_like(there[:, :288])
        gated = ops.gated_activation(there, out=half, backend=target.backend)
        return normed.cpu(), gated.cpu()

    norms, gates = run(spoilt)
    assert norms[1].isnan().all() and gates[[1, 3]].isfinite().logical_not().sum() == 2
    for i in (0, 2, 4):
        norm, gate = run(x[i : i + 1])
        assert torch.equal(bits(norms[i : i + 1]), bits(norm))
        assert torch.equal(bits(gates[i : i + 1]), bits(gate))


@every_backend
def test_no_rows(target: Target) -> None:
    x = target.put(torch.zeros(0, 16))
    ops.rms_norm(x, target.put(torch.ones(16)), out=x.clone(), backend=target.backend)
    ops.gated_activation(x, out=x[:, :8].clone(), backend=target.backend)


X, W = torch.zeros(2, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("kind", "text", "call"),
    [
        (ValueError, "x has shape [8]: expected [rows, columns]",
         lambda: ops.rms_norm(W, W, out=W)),
        (TypeError, "x has dtype int32: expected float32",
         lambda: ops.rms_norm(X.int(), W, out=X)),
        (ValueError, "weight has shape [7]: expected [columns] = [8]",
         lambda: ops.rms_norm(X, W[:7], out=X)),
        (TypeError, "weight has dtype float16: expected float32",
         lambda: ops.rms_norm(X, W.half(), out=X)),
        (ValueError, "out has shape [1, 8]", lambda: ops.rms_norm(X, W, out=X[:1])),
        (ValueError, "out is x: with added", lambda: ops.rms_norm(X, W, out=X, added=X.clone())),
        (ValueError, "added_weight is given: it needs added",
         lambda: ops.rms_norm(X, W, out=X, added_weight=W)),
        (ValueError, "eps = -1: give 0 or more", lambda: ops.rms_norm(X, W, out=X, eps=-1.0)),
        (ValueError, "x has shape [2, 0]: give 1..1073741824 columns",
         lambda: ops.rms_norm(X[:, :0], W[:0], out=X[:, :0])),
        (ValueError, "x has stride 8 on its last axis",
         lambda: ops.rms_norm(torch.zeros(8, 8).T, W, out=torch.zeros(8, 8))),
        (ValueError, "x has 7 columns: two halves are needed",
         lambda: ops.gated_activation(X[:, :7], out=X[:, :3])),
        (ValueError, "out has shape [2, 8]: expected [rows, columns] = [2, 4]",
         lambda: ops.gated_activation(X, out=X.clone())),
        (ValueError, "activation = 'relu': give 'silu' or 'gelu_tanh'",
         lambda: ops.gated_activation(X, out=X[:, :4].clone(), activation="relu")),
    ],
)  # fmt: skip
def test_refusals(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    refused(kind, text, call)
