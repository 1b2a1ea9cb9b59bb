"""Matrix products of a pass: of its rows at once, or of a fixed number of rows.

A library picks its kernel, and with it the order of every sum, by the shape of a product. With a
fixed number of rows the shape is the same whatever the step, so a row's bits cannot follow from how
many rows share the step. That they do not follow from the row's place among them either is tried
when a model is loaded (`check_fixed_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import ConfigError

__all__ = ["FIXED_ROWS", "check_fixed_rows", "product"]

# Rows of a product in exact mode: the step tokens that one request may have.
FIXED_ROWS = 128


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    count: int,
    *,
    fixed_rows: bool,
) -> torch.Tensor:
    """out = x weight^T + bias for the first `count` rows of two buffers; returns out[:count].

    x, out  [rows, K] and [rows, N]; with fixed_rows their rows are a multiple of FIXED_ROWS, and
            those from `count` on are computed for nobody
    """
    if not fixed_rows:
        return _multiply(x[:count], weight, bias, out[:count])
    for first in range(0, count, FIXED_ROWS):
        rows = slice(first, first + FIXED_ROWS)
        _multiply(x[rows], weight, bias, out[rows])
    return out[:count]


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


@torch.inference_mode()
def check_fixed_rows(weights: Iterable[torch.Tensor], device_name: str) -> None:
    """Raise ConfigError unless a row's bits are the same at every place and in any company.

    weights  [N, K] each; one of each shape is tried
    """
    for weight in {tuple(w.shape): w for w in weights}.values():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(FIXED_ROWS, weight.shape[1], generator=generator)
        x = x.to(weight.device, weight.dtype)
        other = torch.zeros_like(x)
        other[1::2] = float("nan")
        out = torch.empty(FIXED_ROWS, weight.shape[0], dtype=x.dtype, device=x.device)
        product(x, weight, None, out, FIXED_ROWS, fixed_rows=True)
        expected = out[0].clone()
        for place in (0, 1, 7, 8, 31, 63, 64, FIXED_ROWS - 1):
            for company in (x, other):
                rows = company.clone()
                rows[place] = x[0]
                product(rows, weight, None, out, FIXED_ROWS, fixed_rows=True)
                if not torch.equal(out[place], expected):
                    raise ConfigError(
                        f"numerics = 'exact' on {device_name}: torch's product with a weight of "
                        f"{list(weight.shape)} gives a row other bits at place {place} than at "
                        "place 0; use numerics='fast'"
                    )
