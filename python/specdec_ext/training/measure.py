"""Accuracy on held-out text: where in a head's ranking does the target's token stand?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .data import Batch, TrainingData

__all__ = ["RankCounter", "held_out_batches"]

RANKS = 10
_TEXTS = 8
_BLOCK = 512


def held_out_batches(data: TrainingData, device: torch.device) -> Iterator[Batch]:
    for at in range(0, len(data.held_out), _TEXTS):
        yield data.make(data.held_out[at : at + _TEXTS], device)


class RankCounter:
    """Counts, per position (head or recurrent step), the ranks of the target's tokens."""

    def __init__(self, positions: int) -> None:
        self._counts = torch.zeros(positions, RANKS, dtype=torch.int64)
        self._total = torch.zeros(positions, dtype=torch.int64)
        self._by_category: dict[str, list[int]] = {}

    def add(
        self,
        position: int,
        scores: torch.Tensor,
        labels: torch.Tensor,
        batch: Batch,
        rows: torch.Tensor,
    ) -> None:
        """scores [n, V'], labels int64 [n] (-1: not in the reduced vocabulary, counts as wrong),
        rows [n]: the batch's rows, which say what kind of text it is."""
        found = labels >= 0
        own = scores.gather(1, labels.clamp_min(0)[:, None])
        rank = (scores > own).sum(dim=1)
        for r in range(RANKS):
            self._counts[position, r] += int((found & (rank == r)).sum())
        self._total[position] += len(labels)
        if position == 0:
            right = found & (rank == 0)
            begin = 0
            for text in batch.texts:
                end = begin + len(text.continuation)
                inside = (rows >= begin) & (rows < end)
                counts = self._by_category.setdefault(text.category, [0, 0])
                counts[0] += int((right & inside).sum())
                counts[1] += int(inside.sum())
                begin = end

    def measures(self) -> dict[str, Any]:
        share = self._counts / self._total.clamp_min(1)[:, None]
        return {
            "accuracy": [round(float(x), 4) for x in share[:, 0]],
            "rank_accuracy": [[round(float(x), 4) for x in row] for row in share],
            "num_tokens": [int(x) for x in self._total],
            "accuracy_by_category": {
                name: round(right / max(1, total), 4)
                for name, (right, total) in sorted(self._by_category.items())
            },
        }
