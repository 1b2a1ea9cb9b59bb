"""A draft model's passes over rows that operations of a step have made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import _core, ops
from ..models.device_step import DeviceStep

if TYPE_CHECKING:
    from torch import Tensor

    from ..models import StepModel
    from ..models.place import Place

__all__ = ["DraftForward", "PackedRows", "RowPacker"]


@dataclass(frozen=True)
class PackedRows:
    """Rows of a pass: those of D requests one after another, then padding.

    request    [R] int64, of padding the last
    positions  [R] int32 absolute
    is_row     [R] bool, False: padding
    parents    [R] int32 within the request: the row before, -1 for its first and for padding
    cu_rows    [D + 1] int32
    """

    request: Tensor
    positions: Tensor
    is_row: Tensor
    parents: Tensor
    cu_rows: Tensor


class RowPacker:
    """Packs rows of requests that each read some positions in a row.

    max_rows, max_requests  of a pass
    """

    def __init__(self, max_rows: int, max_requests: int, place: Place) -> None:
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._is_cpu = place.is_cpu
        self._row = torch.arange(max_rows, **how)
        self._cu_rows = torch.zeros(max_requests + 1, **how)

    def pack(self, start: Tensor, count: Tensor, most: int) -> PackedRows | None:
        """Rows at positions start .. start + count - 1 of each request, [D] int32 both.

        most  rows of all requests together, an upper bound: on a device there are so many, padding
              included; on the CPU as many as are needed, and None where there are none
        Valid until the next call.
        """
        requests = len(start)
        cu_rows = self._cu_rows[: requests + 1]
        torch.cumsum(count, 0, dtype=torch.int32, out=cu_rows[1:])
        rows = self._row[: int(cu_rows[requests]) if self._is_cpu else most]
        if len(rows) == 0:
            return None
        request = torch.searchsorted(cu_rows[1:], rows, right=True)
        is_row = request < requests
        request = request.clamp_max(requests - 1)
        offset = rows - cu_rows.index_select(0, request)
        positions = (start.index_select(0, request) + offset).masked_fill(~is_row, 0)
        parents = (offset - 1).masked_fill(~is_row, -1)
        return PackedRows(request, positions, is_row, parents, cu_rows)


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
        self._positions = torch.zeros(max_rows, **how)
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
        kept = (self._positions, self._mask, self._is_tree, self._status, self._scores)
        return sum(t.numel() * t.element_size() for t in kept if t is not None)

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """The draft model's pages [layers, P, G, S, K]."""
        self.model.bind_cache(k_pages, v_pages)
        self._pages = (k_pages, v_pages)

    def __call__(
        self,
        tokens: Tensor,
        packed: PackedRows,
        page_table: Tensor,
        kv_len: Tensor,
        cu_logits: Tensor,
        logit_rows: Tensor,
        *,
        needs_scores: bool,
        max_rows: int,
        max_kv_len: int,
    ) -> Tensor:
        """K/V of the rows [R] into the pages; ids int32 [L] or scores [L, num_scores] of the rows
        logit_rows. cu_logits [D + 1] int32: the first of each request. Valid until the next call.
        """
        assert self._pages is not None
        count, requests = len(tokens), len(kv_len)
        positions, mask = self._positions[:count], self._mask[:count]
        is_tree, status = self._is_tree[:requests], self._status[:requests]
        ops.build_step(
            packed.parents,
            page_table,
            kv_len,
            packed.cu_rows,
            positions=positions,
            mask=mask,
            is_tree=is_tree,
            page_size=self._pages[0].shape[3],
            num_pages=self._pages[0].shape[1],
            max_rows=max_rows,
            backend=self._place.backend,
            status=status,
        )
        self.num_passes += 1
        self.num_rows += count
        step = DeviceStep(
            tokens, positions, mask, packed.cu_rows, kv_len, is_tree, page_table, logit_rows,
            status, max_rows, max_kv_len,
        )  # fmt: skip
        if self._place.is_cpu:
            return self._run_plan(step, packed.parents, cu_logits, needs_scores)
        decoder = self.model.decoder  # type: ignore[attr-defined]  # a device's model
        hidden = decoder.forward_rows(step)
        if not needs_scores:
            return decoder.greedy(hidden)  # type: ignore[no-any-return]
        assert self._scores is not None
        return decoder.scores(hidden, self._scores[: len(hidden)])  # type: ignore[no-any-return]

    def _run_plan(
        self, step: DeviceStep, parents: Tensor, cu_logits: Tensor, needs_scores: bool
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
            parents=parents,
            mask=step.mask,
            cu_rows=step.cu_rows,
            kv_len=step.kv_len,
            is_tree=step.is_tree,
            page_table=step.page_table,
            logit_rows=step.logit_rows,
            cu_logits=cu_logits,
            page_size=self._pages[0].shape[3],
            num_pages=self._pages[0].shape[1],
            needs_logits=needs_scores,
        )
        return self.model.forward(self._plan)
