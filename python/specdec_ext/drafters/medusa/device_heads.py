"""Medusa heads on the target's device: torch's products, the best guesses chosen there.

best() only enqueues work, into buffers that reserve() made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .heads import MedusaHeads

__all__ = ["DeviceHeads"]


class DeviceHeads:
    """PackedHeads' answers from a device; activations are of the weights' dtype there.

    num_heads  the first so many of `heads` are kept
    model      a StepModel with a `place`; gives the LM head where the heads share the target's, by
               its `scores_into` if it has one, else by its `head`, which makes tensors
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
        # A dtype of the heads' own is rounded to the target's before its head.
        self._target_dtype = model.kv_dtype
        self._scores_into = getattr(model, "scores_into", None)
        self._buffers: dict[str, torch.Tensor] = {}
        self._reserved = (0, 0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, without a head that is the target's."""
        tensors = [t for block in self._blocks for t in block if t is not None]
        tensors += [] if self._lm_head is None else [self._lm_head]
        return _bytes_of(tensors)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of what reserve() made."""
        return _bytes_of(self._buffers.values())

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take for a while: the scores, and choosing from them."""
        size = 4 if self._target is not None else self._dtype.itemsize
        return 2 * self.num_heads * max_requests * self.num_scores * size

    def reserve(self, max_requests: int, top_k: int) -> None:
        """Make the buffers of steps of so many requests, all heads, and so many guesses of each.

        Smaller steps use them as they are; a larger one replaces them.
        """
        rows, top_k = max(max_requests, self._reserved[0]), max(top_k, self._reserved[1])
        if (rows, top_k) == self._reserved:
            return
        self._reserved = (rows, top_k)
        features, guesses = rows * self.hidden_size, rows * top_k
        score_dtype = torch.float32 if self._target is not None else self._dtype
        sizes = {
            "x": (features, self._dtype),
            "y": (features, self._dtype),
            "scores": (rows * self.num_scores, score_dtype),
            "best": (guesses, score_dtype),
            "columns": (guesses, torch.int64),
        }
        if self.token_ids is not None:
            sizes["ids"] = (guesses, torch.int32)
        if self._target is not None and self._dtype != self._target_dtype:
            sizes["target_x"] = (features, self._target_dtype)
        self._buffers = {
            name: torch.empty(self.num_heads * size, dtype=dtype, device=self.device)
            for name, (size, dtype) in sizes.items()
        }

    def scores(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """[num_heads, B, V'] on the device of the first heads, for hidden [B, hidden_size].

        A buffer: valid until the next call.
        """
        rows = len(hidden)
        self.reserve(rows, 1)
        x = self._buffer("x", num_heads, rows, self.hidden_size)
        y = self._buffer("y", num_heads, rows, self.hidden_size)
        out = self._buffer("scores", num_heads, rows, self.num_scores)
        x.copy_(hidden.expand_as(x))
        for weight, bias in self._blocks:
            matrices = weight[:num_heads].transpose(1, 2)
            if bias is None:
                torch.bmm(x, matrices, out=y)
            else:
                torch.baddbmm(bias[:num_heads], x, matrices, out=y)
            x.add_(nn.functional.silu(y, inplace=True))
        flat, flat_out = x.flatten(0, 1), out.flatten(0, 1)
        if self._target is not None:
            self._score_as_the_target(flat, flat_out)
            return out
        assert self._lm_head is not None
        if self._is_joint:
            torch.mm(flat, self._lm_head[0].t(), out=flat_out)
        else:
            torch.bmm(x, self._lm_head[:num_heads].transpose(1, 2), out=out)
        return out

    def best(self, hidden: torch.Tensor, num_heads: int, top_k: int) -> torch.Tensor:
        """Token ids int32 or int64 [num_heads, B, top_k] on the device, the best guess first.

        hidden  [B, hidden_size] on the device. A buffer: valid until the next call. Nothing is
                waited for; what it launches depends on the shapes alone.
        """
        rows = len(hidden)
        self.reserve(rows, top_k)
        scores = self.scores(hidden, num_heads)
        columns = self._buffer("columns", num_heads, rows, top_k)
        best = self._buffer("best", num_heads, rows, top_k)
        torch.topk(scores, top_k, out=(best, columns))
        if self.token_ids is None:
            return columns
        ids = self._buffer("ids", num_heads, rows, top_k)
        torch.index_select(self.token_ids, 0, columns.flatten(), out=ids.view(-1))
        return ids

    def _score_as_the_target(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [n, hidden_size], out [n, V]."""
        if self._scores_into is None:
            out.copy_(self._target(x.float()))
            return
        if self._dtype != self._target_dtype:
            x = self._buffer("target_x", *x.shape).copy_(x)
        self._scores_into(x, out)

    def _buffer(self, name: str, *shape: int) -> torch.Tensor:
        return self._buffers[name][: math.prod(shape)].view(shape)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
