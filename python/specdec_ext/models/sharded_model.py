"""The native model on several ranks: rank 0's side, and the part of a step that is all ranks'.

Rank 0 is a StepModel as every other: who calls forward() does not know of ranks. It sends the plan
and the rows' embeddings; each rank runs its shard part by part; scores come together on rank 0
(docs/tensor_parallel.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _core
from ..parallel.link import Link
from ..parallel.team import BIND, FORWARD, Team
from .config_reader import ModelConfig
from .native import NativeModel
from .native_config import NativeShape
from .shard import Shard

__all__ = ["ShardedModel", "finish_ids", "finish_scores", "run_parts"]

_BEST_BYTES = 8  # a score and its token


class ShardedModel(NativeModel):
    """Rank 0 of a tensor-parallel model. It has all embeddings and the whole head, so that drafters
    ask it alone; K/V pages are of its own heads."""

    shard: Shard

    def __init__(
        self,
        config: ModelConfig,
        shape: NativeShape,
        dtype: str,
        *,
        shard: Shard,
        team: Team,
        **how: Any,
    ) -> None:
        """`how` is NativeModel's"""
        self._team = team
        super().__init__(config, shape, dtype, shard=shard, **how)
        self._page_size = 0

    def _layer_was_read(self) -> None:
        self._team.look()

    def bind_cache(self, k_pages: Any, v_pages: Any) -> None:
        """See StepModel; the other ranks make pages of their heads."""
        super().bind_cache(k_pages, v_pages)
        _, pages, _, self._page_size, _ = k_pages.shape
        self._team.tell(BIND, np.array([pages, self._page_size], dtype=np.int32))

    def forward(self, plan: Any, hidden: Any = None) -> np.ndarray:
        """See StepModel. Raises EngineError when a rank is lost."""
        with self._team.step():
            step = _core.ShardedStep(self._decoder, plan)  # refuses before a word is sent
            link = self._team.link
            link.tell(FORWARD, plan.pack(self._page_size), step.embedded_rows())
            gathered = run_parts(step, link)
            if plan.needs_logits:
                return self._merged_scores(
                    plan.num_logit_rows,
                    finish_scores(step, link, self.shard, gathered, plan, hidden),
                )
            best = finish_ids(step, link, gathered, plan, hidden)
            ids = np.empty(plan.num_logit_rows, dtype=np.int32)
            _core.merge_best(best, ids)
            return ids

    def _merged_scores(self, rows: int, chunks: np.ndarray) -> np.ndarray:
        scores = np.empty((rows, self.num_scores), dtype=np.float32)
        for rank, chunk in enumerate(chunks.reshape(self.shard.size, -1)):
            own = self.shard.scores(rank)
            count = rows * (own.stop - own.start)
            scores[:, own] = chunk.view(np.float32)[:count].reshape(rows, -1)
        return scores


def run_parts(step: Any, link: Link) -> np.ndarray:
    """All ranks: the layers of a step. The chunks behind the last part."""
    gathered: Any = None
    for part in range(step.num_parts):
        size = step.chunk_bytes(part)
        step.run_part(part, gathered, link.chunk(size))
        gathered = link.gather(size)
    return np.asarray(gathered)


def finish_scores(
    step: Any, link: Link, shard: Shard, gathered: np.ndarray, plan: Any, hidden: Any = None
) -> np.ndarray:
    """All ranks: the scores that each computes, on rank 0; the longest rank's sets the size."""
    rows = plan.num_logit_rows
    most = max(high - low for low, high in zip(shard.head, shard.head[1:], strict=False))
    own = shard.scores(shard.rank)
    size = max(1, rows * most * 4)
    mine = link.chunk(size)[: rows * (own.stop - own.start) * 4]
    step.finish(gathered, mine.view(np.float32).reshape(rows, -1), hidden)
    return link.gather(size, to_rank_0=True)


def finish_ids(
    step: Any, link: Link, gathered: np.ndarray, plan: Any, hidden: Any = None
) -> np.ndarray:
    """All ranks: the best of the scores that each computes, uint8 [size, L, 8] on rank 0."""
    rows = plan.num_logit_rows
    size = max(1, rows * _BEST_BYTES)
    mine = link.chunk(size)[: rows * _BEST_BYTES].reshape(rows, _BEST_BYTES)
    step.finish(gathered, mine, hidden)
    whole = link.gather(size, to_rank_0=True)
    return whole[: link.size * rows * _BEST_BYTES].reshape(link.size, rows, _BEST_BYTES)
