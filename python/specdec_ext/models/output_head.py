"""The output head of an adapted transformers model, on its own.

A class may do more after its output embedding than return what that gives: scale the scores
(Cohere, Granite) or cap them (Gemma 2). Which of these, is taken from the configuration and held
against the scores that the whole class computed at load.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedModelError
from .packed_modules import PackedLinear

__all__ = ["OutputHead"]

# Largest difference, as a share of the largest score: one more rounding to the model's dtype.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class OutputHead:
    """scores = cap(scale * embedding(hidden)).

    embedding       the module that get_output_embeddings() gives: its weight packed, or on a device
    hidden, scores  [n, hidden_size] and [n, V]: a step of the whole class, on the CPU

    Raises UnsupportedModelError when no scale and cap that the configuration names explain the
    scores.
    """

    def __init__(
        self,
        embedding: Any,
        hf_config: Any,
        dtype: torch.dtype,
        hidden: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        if not isinstance(embedding, (PackedLinear, torch.nn.Linear)):
            raise UnsupportedModelError(
                f"its output embedding is a {type(embedding).__name__}, not a linear layer"
            )
        self._embedding = embedding
        self._dtype = dtype
        self._scale, self._cap = 1.0, 0.0
        raw = self._raw(hidden)
        largest = max(float(scores.abs().max()), 1e-30)
        for scale, cap in _candidates(hf_config):
            self._scale, self._cap = scale, cap
            if float((self._finish(raw) - scores).abs().max()) <= _TOLERANCE[dtype] * largest:
                return
        raise UnsupportedModelError(
            "its scores are not its output embedding's with a scale or a soft cap"
        )

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, V] for float32 hidden [n, hidden_size]."""
        return self._finish(self._raw(hidden))

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [n, hidden_size]: rows of the embedding's weight, times the scale."""
        if isinstance(self._embedding, PackedLinear):
            out = torch.empty(token_ids.numel(), self._embedding.in_features, dtype=torch.float32)
            self._embedding.packed.unpack_rows(token_ids.to(torch.int32).contiguous(), out)
        else:
            weight = self._embedding.weight
            out = weight[token_ids.to(weight.device, torch.int64).flatten()].float()
            out = out.to(token_ids.device)
        return out.mul_(self._scale) if self._scale != 1.0 else out

    def _raw(self, hidden: torch.Tensor) -> torch.Tensor:
        device = self._embedding.weight.device  # of a packed one the CPU
        raw: torch.Tensor = self._embedding(hidden.to(device, self._dtype))
        return raw.float().to(hidden.device)

    def _finish(self, raw: torch.Tensor) -> torch.Tensor:
        scores = raw * self._scale if self._scale != 1.0 else raw
        return torch.tanh(scores / self._cap) * self._cap if self._cap else scores


def _candidates(hf_config: Any) -> list[tuple[float, float]]:
    """(scale, cap) that the configuration names, no change last."""
    multiply = float(getattr(hf_config, "logit_scale", None) or 1.0)
    divide = float(getattr(hf_config, "logits_scaling", None) or 1.0)
    cap = float(getattr(hf_config, "final_logit_softcapping", None) or 0.0)
    scales = dict.fromkeys((multiply / divide, multiply, 1.0 / divide, 1.0))
    return [(scale, c) for scale in scales for c in dict.fromkeys((cap, 0.0))]
