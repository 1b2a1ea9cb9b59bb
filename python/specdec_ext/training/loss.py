"""Cross entropy against a mixture of the target's distribution and its token, over a frozen head.

The head is the target's, restricted to the reduced vocabulary, and is not trained. So the
gradient is only wanted at the features, and one pass per block of rows computes loss and gradient
without ever keeping scores of more than a block.

A step scores a part of the reduced vocabulary: its most frequent tokens, the step's own tokens, and
a random share q of the rest, whose scores are raised by log(1 / q): in expectation each stands for
the 1 / q tokens of which it was drawn, so the normaliser is that of the whole (sampled softmax).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

__all__ = [
    "DTYPES",
    "FrozenHead",
    "Precision",
    "StepHead",
    "depth_weights",
    "soft_cross_entropy",
]

# A written file's dtype, by its name.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

_BLOCK = 256
# Tokens that every step scores, and how many of the rest it draws.
FREQUENT, DRAWN = 1536, 512


class Precision(str, Enum):
    """What matrix products of a step are computed in; weights and their updates are float32."""

    BF16 = "bf16"
    FLOAT32 = "float32"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self is Precision.BF16 else torch.float32

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self is Precision.BF16)


def depth_weights(depth: int) -> list[float]:
    """What each draft's loss counts for; they add up to 1. A later draft is worth less: it is
    reached only when all before it were right."""
    decay = 0.8
    total = sum(decay**i for i in range(depth))
    return [decay**i / total for i in range(depth)]


@dataclass(frozen=True)
class StepHead:
    """The part of the head that one step scores.

    weight  [S, hidden_size]; products are in its dtype, bfloat16 as the target's own, or float32
    offset  float32 [S], added to the scores
    column  int64 [V']: where a row of the whole head is here, -1 where it is not
    softcap of the target's own scores, 0 for none
    """

    weight: torch.Tensor
    offset: torch.Tensor
    column: torch.Tensor
    softcap: float = 0.0

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        """float32 [n, S]."""
        scores = (features.to(self.weight.dtype) @ self.weight.T).float()
        return scores.add_(self.offset)

    @torch.no_grad()
    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, S]: the target's distribution, for its hidden states [n, hidden_size]."""
        size, dtype = self.weight.shape[0], self.weight.dtype
        result = hidden.new_empty((hidden.shape[0], size), dtype=dtype)
        for at in range(0, hidden.shape[0], _BLOCK):
            block = self.scores(hidden[at : at + _BLOCK])
            if self.softcap:
                block.sub_(self.offset).div_(self.softcap).tanh_().mul_(self.softcap)
                block.add_(self.offset)
            result[at : at + _BLOCK] = block.softmax(dim=-1).to(dtype)
        return result


class FrozenHead:
    """Rows of the target's output head that belong to the reduced vocabulary.

    weight  float32 [V', hidden_size]
    ranked  int64 [V']: its rows, the most frequent token first
    dtype   of the products in training
    softcap of the target's own scores, 0 for none; what is trained needs none
    """

    def __init__(
        self,
        weight: torch.Tensor,
        ranked: torch.Tensor,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        softcap: float = 0.0,
    ) -> None:
        self.weight = weight.to(device)
        self._low = self.weight.to(dtype)
        self._softcap = softcap
        self._frequent = ranked[:FREQUENT]
        self._rest = ranked[FREQUENT:]

    @torch.no_grad()
    def scores(self, features: torch.Tensor) -> torch.Tensor:
        """float32 [n, V'] in full precision over the whole reduced vocabulary, for evaluation."""
        return features.float() @ self.weight.T

    def for_step(self, labels: torch.Tensor, seed: int) -> StepHead:
        """labels: int64 rows of the head that must be there, or -1, of the whole step."""
        size, device = self.weight.shape[0], self.weight.device
        offset = torch.full((size,), float("nan"))
        if len(self._rest):
            share = min(1.0, DRAWN / len(self._rest))
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(self._rest), generator=generator)
            drawn = self._rest[order[: round(share * len(self._rest))]]
            offset[drawn] = -torch.log(torch.tensor(share))
        offset[labels[labels >= 0].cpu()] = 0.0
        offset[self._frequent] = 0.0
        rows = (~offset.isnan()).nonzero().squeeze(1)
        column = torch.full((size,), -1, dtype=torch.int64)
        column[rows] = torch.arange(len(rows))
        return StepHead(
            self._low[rows.to(device)], offset[rows].to(device), column.to(device), self._softcap
        )


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        head: StepHead,
        teacher: torch.Tensor,
        teacher_rows: torch.Tensor,
        labels: torch.Tensor,
        soft_share: float,
        count: float,
    ) -> torch.Tensor:
        total = features.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(features, dtype=torch.float32)
        hard_share = 1.0 - soft_share
        columns = head.column[labels]
        for at in range(0, features.shape[0], _BLOCK):
            part = slice(at, at + _BLOCK)
            scores = head.scores(features[part])
            wanted = teacher[teacher_rows[part]].float().mul_(soft_share)
            wanted.scatter_add_(
                1, columns[part, None], wanted.new_full((wanted.shape[0], 1), hard_share)
            )
            normalizer = torch.logsumexp(scores, dim=-1, keepdim=True)
            total += normalizer.sum() - (wanted * scores).sum()
            difference = scores.sub_(normalizer).exp_().sub_(wanted)
            gradient[part] = (difference.to(head.weight.dtype) @ head.weight).float()
        ctx.save_for_backward(gradient.div_(count))
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None, None, None


def soft_cross_entropy(
    features: torch.Tensor,
    head: StepHead,
    teacher: torch.Tensor,
    teacher_rows: torch.Tensor,
    labels: torch.Tensor,
    soft_share: float,
    count: float | None = None,
) -> torch.Tensor:
    """Mean over rows of -sum_v w[v] log softmax(head(features))[v].

    features      [n, hidden_size], what is trained
    teacher       [R, S] distributions of the target (StepHead.probabilities)
    teacher_rows  int64 [n]: which of them belongs to each row
    labels        int64 [n]: the target's token, as a row of the whole head, none -1
    soft_share    w = soft_share * teacher + (1 - soft_share) * one-hot(label)
    count         what the sum is divided by where these are some of a step's rows; None: n
    """
    result: torch.Tensor = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        features, head, teacher, teacher_rows, labels, soft_share,
        max(1, features.shape[0]) if count is None else count,
    )  # fmt: skip
    return result
