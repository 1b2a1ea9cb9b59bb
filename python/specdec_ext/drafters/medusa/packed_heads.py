"""Medusa heads packed for decoding: few rows at a time, the weights streamed once per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ... import _core
from ...models.host_arrays import as_torch, converted, from_torch, like

if TYPE_CHECKING:
    from torch import nn

    from .heads import MedusaHeads

__all__ = ["PackedHeads"]


class PackedHeads:
    """The heads over our few-row linear kernel, in one dtype.

    num_heads  the first so many of `heads` are kept
    model      a StepModel: gives the LM head where the heads share the target's
    """

    def __init__(self, heads: MedusaHeads, model: Any, *, num_heads: int, dtype: str) -> None:
        config = heads.config
        self.num_heads = num_heads
        self.hidden_size = config.hidden_size
        self.num_scores = config.head_rows
        ids = heads.token_ids
        self.token_ids: Any = None if ids is None else from_torch(ids)
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
            self._target, self._model = model.head, model
            # Refuses here, not in the first step.
            model.head(_rows(model, np.zeros((1, self.hidden_size), dtype=np.float32)))
        elif config.lm_head == "target":
            rows = np.asarray(model.head_rows(heads.token_ids))
            self._lm_heads = [_core.PackedLinear(converted(rows, dtype))]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights, without a head that is the target's."""
        linears = [*([] if self._first is None else [self._first]), *self._lm_heads]
        linears += [linear for head in self._deeper for linear in head]
        return sum(int(linear.weight_bytes) for linear in linears)

    def scores(self, hidden: Any, num_heads: int) -> Any:
        """float32 [num_heads, B, V'] of the first heads, for float32 hidden [B, hidden_size]: an
        array for an array, a tensor for a tensor."""
        states = np.ascontiguousarray(hidden)
        features = self._features(states, num_heads)
        rows = len(states)
        flat = features.reshape(num_heads * rows, self.hidden_size)
        if self._target is not None:
            given = np.asarray(self._target(_rows(self._model, flat)))
            return like(hidden, given.reshape(num_heads, rows, -1))
        out = np.empty((num_heads, rows, self.num_scores), dtype=np.float32)
        if self._is_joint:
            self._lm_heads[0].run(flat, out.reshape(num_heads * rows, -1))
        else:
            for head in range(num_heads):
                self._lm_heads[head].run(features[head], out[head])
        return like(hidden, out)

    def top(self, hidden: Any, num_heads: int, top_k: int) -> Any:
        """Token ids int32 [num_heads, B, top_k] of the best guesses, best first; as scores()."""
        scores = np.asarray(self.scores(hidden, num_heads))
        ids = np.empty((*scores.shape[:2], top_k), dtype=np.int32)
        _core.best_scores(scores.reshape(-1, scores.shape[2]), ids.reshape(-1, top_k))
        return like(hidden, ids if self.token_ids is None else self.token_ids[ids])

    def _features(self, hidden: np.ndarray, num_heads: int) -> np.ndarray:
        """What the LM heads read: [num_heads, B, hidden_size], contiguous."""
        rows, size = hidden.shape
        if self._first is None:
            return np.broadcast_to(hidden, (num_heads, rows, size)).copy()
        out = np.empty((rows, self.num_heads * size), dtype=np.float32)
        self._first.run(hidden, out)
        stacked = out.reshape(rows, self.num_heads, size)[:, :num_heads].transpose(1, 0, 2)
        x = np.ascontiguousarray(_silu(stacked) + hidden)
        for head in range(num_heads):
            for linear in self._deeper[head]:
                y = np.empty((rows, size), dtype=np.float32)
                linear.run(x[head], y)
                x[head] += _silu(y)
        return x


def _rows(model: Any, rows: np.ndarray) -> Any:
    """As `model` takes rows: only the native decoder on the CPU takes arrays."""
    return rows if hasattr(model, "kv_dtype_name") else as_torch(rows)


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp of a large number: the quotient is 0
        result: np.ndarray = x / (np.float32(1) + np.exp(-x))
    return result


def _packed(linears: list[nn.Linear], dtype: str) -> Any:
    """One layer of several, stacked along the outputs."""
    weight = np.concatenate([linear.weight.detach().numpy() for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = np.concatenate([linear.bias.detach().float().numpy() for linear in linears])
    return _core.PackedLinear(converted(weight, dtype), bias)
