"""nn.Linear, replaced by our few-row linear layer."""

from __future__ import annotations

import torch

from .. import _core

__all__ = ["PackedLinear", "swap_linears"]


class PackedLinear(torch.nn.Module):
    """y = x W^T + b on prepacked weights; a row's bits do not depend on the number of rows.

    x [..., K] and y [..., N] are of the caller's dtype; accumulation is float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = _core.PackedLinear(
            weight.detach().contiguous(), None if bias is None else bias.detach().contiguous()
        )
        self._dtype = weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        """Shape, dtype and device of the weight for code that asks; its values are NaN, so code
        that computes with it is found by the canary instead of being silently wrong."""
        nan = torch.full((), float("nan"), dtype=self._dtype)
        return nan.expand(self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = torch.empty(rows.shape[0], self.out_features, dtype=x.dtype)
        self.packed.run(rows if rows.stride(-1) == 1 else rows.contiguous(), out)
        return out.view(*x.shape[:-1], self.out_features)


def swap_linears(model: torch.nn.Module) -> tuple[int, int]:
    """Replace every nn.Linear (and transformers' Conv1D) in place, releasing each weight in turn.

    Returns (layers replaced, bytes of packed weights).
    """
    from transformers.pytorch_utils import Conv1D

    packed: dict[int, PackedLinear] = {}
    total_bytes = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                weight, bias = child.weight, child.bias
            elif type(child) is Conv1D:
                weight, bias = child.weight.t(), child.bias
            else:
                continue
            new = packed.get(id(child))  # one module used in two places stays one
            if new is None:
                new = PackedLinear(weight, bias)
                packed[id(child)] = new
                total_bytes += int(new.packed.weight_bytes)
            setattr(parent, name, new)
    return len(packed), total_bytes
