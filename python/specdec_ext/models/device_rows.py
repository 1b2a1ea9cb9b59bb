"""What a decoder does with each row between its matrix products. Rounds as transformers does."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["add_rms_norm", "gate", "rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset) for each row; out may be x.

    float32 within. Without an offset (Llama) the quotient is rounded before it meets the weight,
    with one (Gemma) everything is rounded once.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return out.copy_(wide * (weight.float() + offset))
    return torch.mul(weight, wide.to(x.dtype), out=out)


def add_rms_norm(
    x: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    eps: float,
    offset: float,
) -> torch.Tensor:
    """x += added; out = rms_norm(x)."""
    x.add_(added)
    return rms_norm(x, weight, out=out, eps=eps, offset=offset)


def gate(both: torch.Tensor, activation: str, *, out: torch.Tensor) -> torch.Tensor:
    """out = activation(first half of each row) * second half; "silu" or "gelu_tanh"."""
    first, second = both.chunk(2, dim=-1)
    if activation == "silu":
        active = functional.silu(first)
    else:
        active = functional.gelu(first, approximate="tanh")
    return torch.mul(active, second, out=out)
