"""A draft model's passes over rows that operations of a step have made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from ..models.device_step import DeviceStep

if TYPE_CHECKING:
    from torch import Tensor

    from ..models import StepModel
    from ..models.place import Place

__all__ = ["ChainRows", "DraftForward"]


@dataclass(frozen=True)
class ChainRows:
    """Rows of a pass: those of D requests one after another, each request's at positions in a row;
    then padding, whose tokens and positions are valid ones.

    tokens, positions  [R] int32
    parents    [R] int32 within the request: the row before, -1 for its first; None: one row each
    cu_rows    [D + 1] int32
    kv_len     [D] int32 position of each request's first row
    max_rows   of any one request, an upper bound that the host knows
    """

    tokens: Tensor
    positions: Tensor
    parents: Tensor | None
    cu_rows: Tensor
    kv_len: Tensor
    max_rows: int


class DraftForward:
    """Runs the draft model: on a device its decoder over all rows, padding too; on the CPU as any
    StepModel that takes plans.

    max_rows, max_requests  of a pass
    """

    def __init__(self, model: StepModel, place: Place, *, max_rows: int, max_requests: int) -> None:
        self.model = model
        self.num_scores: int = getattr(model, "num_scores", model.vocab_size)
        self.num_passes = self.num_rows = 0
        self._place, self._max_rows, self._max_requests = place, max_rows, max_requests
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._roots = torch.full((max_rows,), -1, **how)
        self._every_row = torch.arange(max_rows, **how)
        self._mask = torch.zeros(max_rows, 4, **how)
        self._is_tree = torch.zeros(max_requests, dtype=torch.uint8, device=place.device)
        self._status = torch.zeros(max_requests, **how)
        self._scores: Tensor | None = None  # on a device
        self._plan: Any = None  # on the CPU
        self._plan_pages = 0  # of a request
        self._pages: tuple[Tensor, Tensor] | None = None

    def make_scores(self) -> None:
        """Memory for the scores of a pass on a device, [max_requests, num_scores] float32."""
        if not self._place.is_cpu and self._scores is None:
            self._scores = torch.zeros(
                self._max_requests, self.num_scores, device=self._place.device
            )

    @property
    def memory_bytes(self) -> int:
        kept = (self._roots, self._every_row, self._mask, self._is_tree, self._scores)
        return sum(t.numel() * t.element_size() for t in kept if t is not None)

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """The draft model's pages [layers, P, G, S, K]."""
        self.model.bind_cache(k_pages, v_pages)
        self._pages = (k_pages, v_pages)

    def __call__(
        self,
        rows: ChainRows,
        page_table: Tensor,
        cu_logits: Tensor,
        logit_rows: Tensor | None,
        *,
        needs_scores: bool,
        max_kv_len: int,
    ) -> Tensor:
        """K/V of the rows into the pages; ids int32 [L] or scores [L, num_scores] of logit_rows,
        None: of all. cu_logits [D + 1] int32: each request's first. Valid until the next call."""
        count, requests = rows.tokens.shape[0], rows.kv_len.shape[0]
        self.num_passes += 1
        self.num_rows += count
        step = DeviceStep(
            tokens=rows.tokens,
            positions=rows.positions,
            mask=self._mask[:count],  # nobody reads it: chains
            cu_rows=rows.cu_rows,
            kv_len=rows.kv_len,
            is_tree=self._is_tree[:requests],
            page_table=page_table,
            logit_rows=logit_rows,
            status=self._status[:requests],
            max_rows=rows.max_rows,
            max_kv_len=max_kv_len,
        )
        if self._place.is_cpu:
            return self._run_plan(step, rows.parents, cu_logits, needs_scores)
        decoder = self.model.decoder  # type: ignore[attr-defined]  # a device's model
        hidden = decoder.forward_rows(step)
        if not needs_scores:
            return decoder.greedy(hidden)  # type: ignore[no-any-return]
        assert self._scores is not None
        return decoder.scores(hidden, self._scores[: len(hidden)])  # type: ignore[no-any-return]

    def _run_plan(
        self, step: DeviceStep, parents: Tensor | None, cu_logits: Tensor, needs_scores: bool
    ) -> Tensor:
        assert self._pages is not None
        pages = step.page_table.shape[1]
        if pages > self._plan_pages:
            self._plan_pages = pages
            self._plan = _core.StepPlan(
                max_requests=self._max_requests,
                max_rows=self._max_rows,
                max_pages_per_request=pages,
            )
        _core.fill_step_plan(
            self._plan,
            tokens=step.tokens,
            positions=step.positions,
            parents=self._roots[: step.num_rows] if parents is None else parents,
            mask=step.mask,
            cu_rows=step.cu_rows,
            kv_len=step.kv_len,
            is_tree=step.is_tree,
            page_table=step.page_table,
            logit_rows=self._every_row if step.logit_rows is None else step.logit_rows,
            cu_logits=cu_logits,
            page_size=self._pages[0].shape[3],
            num_pages=self._pages[0].shape[1],
            needs_logits=needs_scores,
        )
        return self.model.forward(self._plan)
