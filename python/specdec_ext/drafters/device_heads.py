"""Medusa heads on the target's device: torch's products, the best guesses chosen there.

Nothing but the guesses themselves crosses to the host, in one copy a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..models.host_rows import HostRows
from .medusa_heads import MedusaHeads

__all__ = ["DeviceHeads"]


class DeviceHeads:
    """PackedHeads' answers from a device; activations are of the weights' dtype there.

    num_heads  the first so many of `heads` are kept
    model      a StepModel with a `place`; gives the LM head where the heads share the target's
    """

    def __init__(
        self, heads: MedusaHeads, model: Any, *, num_heads: int, dtype: torch.dtype
    ) -> None:
        config, device = heads.config, model.place.device
        self.device: torch.device = device
        self.num_heads = num_heads
        self.hidden_size = config.hidden_size
        self.num_scores = config.head_rows
        self.token_ids = None if heads.token_ids is None else heads.token_ids.to(device)
        self._dtype = dtype

        def stacked(weights: list[torch.Tensor]) -> torch.Tensor:
            """[heads, ...], one tensor after another: never all of them twice on the device."""
            out = torch.empty(len(weights), *weights[0].shape, dtype=dtype, device=device)
            for place, weight in zip(out, weights, strict=True):
                place.copy_(weight)
            return out

        # Layer after layer, the blocks of all heads in one batched product.
        self._blocks: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for linears in zip(*heads.block_linears()[:num_heads], strict=True):
            biases = [linear.bias[None] for linear in linears] if config.has_bias else []
            weight = stacked([linear.weight.detach() for linear in linears])
            self._blocks.append((weight, stacked(biases) if biases else None))
        self._is_joint = config.lm_head != "own"  # one LM head for all
        self._lm_head: torch.Tensor | None = None
        self._target: Any = None
        if config.lm_head != "target":
            matrices = [head.get_parameter("weight").detach() for head in heads.lm_heads]
            self._lm_head = stacked(matrices[:num_heads])
        elif self.token_ids is None:
            self._target = model.head
            # Refused here, not in the first step.
            model.head(torch.zeros(1, self.hidden_size, device=device))
        else:
            self._lm_head = model.head_rows(self.token_ids).to(dtype)[None]
        self._guesses = HostRows(device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, without a head that is the target's."""
        tensors = [t for block in self._blocks for t in block if t is not None]
        tensors += [] if self._lm_head is None else [self._lm_head]
        return sum(t.numel() * t.element_size() for t in tensors)

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take for a while: the scores, and choosing from them."""
        size = 4 if self._target is not None else self._dtype.itemsize
        return 2 * self.num_heads * max_requests * self.num_scores * size

    def scores(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """[num_heads, B, V'] on the device of the first heads, for hidden [B, hidden_size]."""
        rows = len(hidden)
        x = hidden.to(self._dtype).expand(num_heads, rows, self.hidden_size)
        for weight, bias in self._blocks:
            matrices = weight[:num_heads].transpose(1, 2)
            if bias is None:
                y = torch.bmm(x, matrices)
            else:
                y = torch.baddbmm(bias[:num_heads], x, matrices)
            x = x + nn.functional.silu(y)
        flat = x.reshape(num_heads * rows, self.hidden_size)
        if self._target is not None:
            scores: torch.Tensor = self._target(flat.float())
            return scores.view(num_heads, rows, -1)
        assert self._lm_head is not None
        if self._is_joint:
            return torch.mm(flat, self._lm_head[0].t()).view(num_heads, rows, -1)
        return torch.bmm(x, self._lm_head[:num_heads].transpose(1, 2))

    def top(self, hidden: torch.Tensor, num_heads: int, top_k: int) -> torch.Tensor:
        """Token ids int32 [num_heads, B, top_k] of the best guesses, the best first, on the host.

        hidden  [B, hidden_size] on the device. What is returned is valid until the next call.
        """
        ids = torch.topk(self.scores(hidden, num_heads), top_k).indices
        if self.token_ids is not None:
            ids = self.token_ids[ids]
        return self._guesses.fetch(ids.to(torch.int32))
