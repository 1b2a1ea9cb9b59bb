"""ReDrafter's layers on the target's device, over rows in buffers that were made once.

Axis letters: H hidden_size, E exit_dim, V' scored tokens, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .model import Redrafter

__all__ = ["LayerRows", "RedrafterLayers"]


@dataclass(frozen=True)
class LayerRows:
    """Activations of R rows, in the target's dtype but for scores of the target's own head.

    read    [R, 2H] a token's embedding, and the state before it
    both    [R, 2H] the context (the target's hidden state), and the state after the token
    x       [R, E] what the head reads
    added   [R, E] what a block adds to it
    scores  [R, V']
    """

    read: torch.Tensor
    both: torch.Tensor
    x: torch.Tensor
    added: torch.Tensor
    scores: torch.Tensor

    def __len__(self) -> int:
        return len(self.read)

    def first(self, rows: int) -> LayerRows:
        """The same memory, less the rows after."""
        return LayerRows(
            self.read[:rows], self.both[:rows], self.x[:rows], self.added[:rows], self.scores[:rows]
        )

    @property
    def _half(self) -> int:
        return self.read.shape[1] // 2

    @property
    def old_state(self) -> torch.Tensor:
        """[R, H] before the tokens."""
        return self.read[:, self._half :]

    @property
    def context(self) -> torch.Tensor:
        """[R, H]"""
        return self.both[:, : self._half]

    @property
    def state(self) -> torch.Tensor:
        """[R, H] after the tokens."""
        return self.both[:, self._half :]


class RedrafterLayers:
    """Weights in the target's dtype, where it is.

    The target may have `embed_rows(ids, out)` and `score_rows(hidden, out)`, which write where they
    are told; else its `embed` and `head` are asked and copied.
    """

    def __init__(self, network: Redrafter, target: Any) -> None:
        shape, device = network.shape, target.place.device
        self.device: torch.device = device
        self.dtype: torch.dtype = target.kv_dtype
        self.hidden_size, self._exit_dim = shape.hidden_size, shape.exit_dim
        self.num_scores = shape.draft_vocab_size or shape.vocab_size

        def there(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
            bias = linear.bias
            return (
                linear.weight.to(device, self.dtype),
                None if bias is None else bias.to(device, self.dtype),
            )

        self._recurrence: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if shape.rnn:
            # One product for both: [e, s] (W_w | W_u)^T + b.
            both = torch.cat((network.rnn_w.weight, network.rnn_u.weight), dim=1)
            bias = network.rnn_u.bias.to(device, self.dtype)
            self._recurrence = (both.to(device, self.dtype), bias)
        self._projection = there(network.input_proj) if shape.has_input_proj else None
        self._blocks = [there(block.linear) for block in network.blocks()]
        self._head: torch.Tensor | None = None
        if not shape.tie_lm_head:
            self._head = network.own_head().weight.to(device, self.dtype)
        elif network.token_ids is not None:
            self._head = target.head_rows(network.token_ids.to(device)).to(self.dtype)
        else:
            target.head(torch.zeros(1, shape.hidden_size, device=device))  # refused here
        self._target = target
        self._embed_rows = getattr(target, "embed_rows", self._copy_embedding)
        self._score_rows = getattr(target, "score_rows", self._copy_scores)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights of its own; a head that is the target's is not counted."""
        layers = [self._recurrence, self._projection, *self._blocks, (self._head, None)]
        tensors = [t for layer in layers if layer is not None for t in layer if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def score_dtype(self) -> torch.dtype:
        """The dtype of LayerRows.scores."""
        return torch.float32 if self._head is None else self.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of make_rows()."""
        values = 4 * self.hidden_size + 2 * self._exit_dim
        return values * self.dtype.itemsize + self.num_scores * self.score_dtype.itemsize

    def choice_bytes(self, rows: int) -> int:
        """Bytes that torch.topk may take temporarily to choose from the scores of `rows` rows."""
        return rows * self.num_scores * self.score_dtype.itemsize

    def make_rows(self, rows: int) -> LayerRows:
        """Zeroed."""

        def zeros(width: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=self.device)

        hidden, exit_dim = self.hidden_size, self._exit_dim
        return LayerRows(
            zeros(2 * hidden),
            zeros(2 * hidden),
            zeros(exit_dim),
            zeros(exit_dim),
            zeros(self.num_scores, self.score_dtype),
        )

    def run(self, rows: LayerRows, tokens: torch.Tensor) -> torch.Tensor:
        """rows.state and rows.scores, which is returned, from tokens [R] int32, rows.old_state and
        rows.context. Makes no tensor where the target writes where it is told."""
        embedding = rows.read[:, : self.hidden_size]
        self._embed_rows(tokens, embedding)
        if self._recurrence is None:
            torch.add(rows.old_state, embedding, out=rows.state)
        else:
            nn.functional.silu(_product(rows.read, *self._recurrence, rows.state), inplace=True)
        x = rows.both
        if self._projection is not None:
            x = _product(x, *self._projection, rows.x)
        elif self._blocks:
            x = rows.x.copy_(x)
        for weight, bias in self._blocks:
            x.add_(nn.functional.silu(_product(x, weight, bias, rows.added), inplace=True))
        if self._head is None:
            self._score_rows(x, rows.scores)
            return rows.scores
        return _product(x, self._head, None, rows.scores)

    def _copy_embedding(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._target.embed(ids))

    def _copy_scores(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._target.head(hidden.float()))


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """x [R, K] weight^T (+ bias [N]) into out [R, N]."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
