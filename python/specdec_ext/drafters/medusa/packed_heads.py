"""Medusa heads packed for decoding: few rows at a time, the weights streamed once per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ... import _core
from .heads import MedusaHeads

__all__ = ["PackedHeads"]


class PackedHeads:
    """The heads over our few-row linear kernel, in one dtype.

    num_heads  the first so many of `heads` are kept
    model      a StepModel: gives the LM head where the heads share the target's
    """

    def __init__(
        self, heads: MedusaHeads, model: Any, *, num_heads: int, dtype: torch.dtype
    ) -> None:
        config = heads.config
        self.num_heads = num_heads
        self.hidden_size = config.hidden_size
        self.num_scores = config.head_rows
        self.token_ids = heads.token_ids
        kept = heads.block_linears()[:num_heads]
        # The first blocks of all heads read the same rows: one layer, stacked.
        self._first: Any = None
        if config.num_medusa_layers > 0:
            self._first = _packed([linears[0] for linears in kept], dtype)
        self._deeper = [[_packed([linear], dtype) for linear in linears[1:]] for linears in kept]
        self._lm_heads = [_packed([head], dtype) for head in heads.lm_heads][:num_heads]  # type: ignore[list-item]
        self._is_joint = config.lm_head != "own"  # one LM head for all
        self._target: Any = None
        if config.lm_head == "target" and heads.token_ids is None:
            self._target = model.head
            model.head(torch.zeros(1, self.hidden_size))  # refuses here, not in the first step
        elif config.lm_head == "target":
            rows = model.head_rows(heads.token_ids).to(dtype)
            self._lm_heads = [_core.PackedLinear(rows.contiguous())]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights, without a head that is the target's."""
        linears = [*([] if self._first is None else [self._first]), *self._lm_heads]
        linears += [linear for head in self._deeper for linear in head]
        return sum(int(linear.weight_bytes) for linear in linears)

    def scores(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """float32 [num_heads, B, V'] of the first heads, for float32 hidden [B, hidden_size]."""
        features = self._features(hidden, num_heads)
        rows = hidden.shape[0]
        flat = features.view(num_heads * rows, self.hidden_size)
        if self._target is not None:
            scores: torch.Tensor = self._target(flat)
            return scores.view(num_heads, rows, -1)
        out = torch.empty(num_heads, rows, self.num_scores, dtype=torch.float32)
        if self._is_joint:
            self._lm_heads[0].run(flat, out.view(num_heads * rows, -1))
        else:
            for head in range(num_heads):
                self._lm_heads[head].run(features[head], out[head])
        return out

    def top(self, hidden: torch.Tensor, num_heads: int, top_k: int) -> torch.Tensor:
        """Token ids int64 [num_heads, B, top_k] of the best guesses, the best first."""
        ids = torch.topk(self.scores(hidden, num_heads), top_k).indices
        return ids if self.token_ids is None else self.token_ids[ids].to(torch.int64)

    def _features(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """What the LM heads read: [num_heads, B, hidden_size], contiguous."""
        rows, size = hidden.shape
        if self._first is None:
            return hidden.expand(num_heads, rows, size).contiguous()
        out = torch.empty(rows, self.num_heads * size, dtype=torch.float32)
        self._first.run(hidden, out)
        stacked = out.view(rows, self.num_heads, size)[:, :num_heads].transpose(0, 1)
        x = nn.functional.silu(stacked).add_(hidden).contiguous()
        for head in range(num_heads):
            for linear in self._deeper[head]:
                y = torch.empty(rows, size, dtype=torch.float32)
                linear.run(x[head], y)
                x[head] += nn.functional.silu(y)
        return x


def _packed(linears: list[nn.Linear], dtype: torch.dtype) -> Any:
    """One layer of several, stacked along the outputs."""
    weight = torch.cat([linear.weight.detach() for linear in linears]).to(dtype)
    biases = [linear.bias for linear in linears]
    bias = None
    if biases[0] is not None:
        bias = torch.cat([b.detach() for b in biases]).float()
    return _core.PackedLinear(weight.contiguous(), bias)
