"""Drafters that draw from tables of their own, for tests of acceptance by probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class DraftShape:
    """A tree of drafts: parents (-1: the golden token), how siblings are drawn, the columns of q.

    kind  "drawn": from q; "argmax": the likeliest of q, no probabilities stated
    """

    parents: tuple[int, ...]
    replacement: bool = False
    ids: tuple[int, ...] | None = None
    kind: str = "drawn"
    max_drafts: int = 127


class TableDrafter:
    """q[before, last, next]: drafts for many requests at once, every context its own law."""

    def __init__(self, table: np.ndarray, shape: DraftShape, seed: int) -> None:
        columns = slice(None) if shape.ids is None else list(shape.ids)
        weights = table[:, :, columns]
        self.rows = (weights / weights.sum(2, keepdims=True)).astype(np.float32)  # [V, V, columns]
        self.shape = shape
        self.ids = np.arange(len(table)) if shape.ids is None else np.array(shape.ids)
        self.rng = np.random.default_rng(seed)

    def draw(self, last_two: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """last_two [B, 2] -> tokens [B, n], rows [B, n, columns]."""
        parents = self.shape.parents
        batch, n = len(last_two), len(parents)
        tokens = np.empty((batch, n), np.int64)
        columns = np.empty((batch, n), np.int64)
        rows = np.empty((batch, n, len(self.ids)), np.float32)
        everyone = np.arange(batch)
        for i, parent in enumerate(parents):
            last = last_two[:, 1] if parent < 0 else tokens[:, parent]
            if parent < 0:
                before = last_two[:, 0]
            else:
                above = parents[parent]
                before = last_two[:, 1] if above < 0 else tokens[:, above]
            rows[:, i] = self.rows[before, last]
            q = rows[:, i].astype(np.float64)
            if not self.shape.replacement:
                for j in (j for j in range(i) if parents[j] == parent):
                    q[everyone, columns[:, j]] = 0.0
            if self.shape.kind == "argmax":
                columns[:, i] = q.argmax(1)
            else:
                steps = np.cumsum(q, 1)
                u = self.rng.random(batch) * steps[:, -1]
                columns[:, i] = (steps <= u[:, None]).sum(1)
            tokens[:, i] = self.ids[columns[:, i]]
        return tokens, rows

    def propose(self, ex: Any, requests: Sequence[int], last_two: np.ndarray) -> None:
        """Hands drafts of every request to the executor."""
        if not len(requests):
            return
        tokens, rows = self.draw(last_two)
        if self.shape.kind == "argmax":
            for rid, row in zip(requests, tokens.tolist(), strict=True):
                ex.propose(rid, row, list(self.shape.parents))
            return
        tensor = torch.from_numpy(rows)
        ids = None if self.shape.ids is None else torch.tensor(self.shape.ids)
        parents = list(self.shape.parents)
        for i, (rid, row) in enumerate(zip(requests, tokens.tolist(), strict=True)):
            ex.propose(
                rid, row, parents, tensor[i], vocab_ids=ids, replacement=self.shape.replacement
            )
