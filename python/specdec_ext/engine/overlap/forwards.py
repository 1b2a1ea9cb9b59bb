"""Models behind the arrays of a step: one that takes plans of the host, one on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec_ext import _core
from specdec_ext.models.host_arrays import as_torch
from specdec_ext.models.place import CPU

if TYPE_CHECKING:
    from specdec_ext.engine.overlap.buffers import StepTensors
    from specdec_ext.models.base import StepModel
    from specdec_ext.models.device_decoder import DeviceDecoder
    from specdec_ext.models.device_moves import KvMoves

__all__ = ["DeviceForward", "HostForward"]


class HostForward:
    """Runs a StepModel that takes plans of the host: the arrays are copied into one when the step
    runs. On a device, where that is the transformers adapter, the step waits for them.

    By then it is known how many rows there are, so the model is given those alone.

    hidden  float32 [n, hidden_size] of the last step's choices, if `keeps_hidden`
    """

    def __init__(
        self,
        model: StepModel,
        executor: Any,
        *,
        page_size: int,
        num_pages: int,
        keeps_hidden: bool = False,
    ) -> None:
        self.model = model
        self.hidden: torch.Tensor | None = None
        self._keeps_hidden = keeps_hidden
        self._device = getattr(model, "place", CPU).device
        staging = executor.staging_layout
        self._plan = _core.StepPlan(
            max_requests=staging.requests,
            max_rows=staging.rows,
            max_pages_per_request=staging.pages_per_request,
        )
        self._page_size, self._num_pages = page_size, num_pages
        self._every_row = torch.arange(staging.rows, dtype=torch.int32)

    def make_hidden(self, rows: int) -> torch.Tensor:
        """Zeroed rows as `hidden` has them."""
        return torch.zeros(rows, self.model.hidden_size, device=self._device)

    def moved(self, moves: KvMoves) -> None:
        """See StepForward: all pages are here."""

    def copied(self, copies: Sequence[Any]) -> None:
        """See StepForward: all pages are here."""

    def __call__(self, tensors: StepTensors) -> torch.Tensor | None:
        step = tensors.step
        _core.fill_step_plan(
            self._plan,
            tokens=step.tokens.cpu(),
            positions=step.positions.cpu(),
            parents=tensors.parents.cpu(),
            mask=step.mask.cpu(),
            cu_rows=step.cu_rows.cpu(),
            kv_len=step.kv_len.cpu(),
            is_tree=step.is_tree.cpu(),
            page_table=step.page_table.cpu(),
            logit_rows=self._every_row if step.logit_rows is None else step.logit_rows.cpu(),
            cu_logits=tensors.cu_logits.cpu(),
            page_size=self._page_size,
            num_pages=self._num_pages,
            needs_logits=tensors.needs_scores,
        )
        if self._keeps_hidden:
            rows = self._plan.num_logit_rows
            self.hidden = torch.empty(rows, self.model.hidden_size, device=self._device)
        if self._plan.num_rows == 0:
            empty = torch.empty(0, self.model.vocab_size, device=self._device)
            return empty if tensors.needs_scores else None
        if self.hidden is None:
            ids = as_torch(self.model.forward(self._plan))
        else:
            ids = as_torch(self.model.forward(self._plan, self.hidden))
        if len(ids) != self._plan.num_logit_rows:
            raise ValueError(
                f"the model returned {len(ids)} rows, {self._plan.num_logit_rows} were asked for"
            )
        if tensors.needs_scores:
            if ids.dim() != 2 or ids.shape[1] != self.model.vocab_size:
                raise ValueError(
                    f"the model returned scores of shape {list(ids.shape)}, "
                    f"[{self._plan.num_logit_rows}, {self.model.vocab_size}] were asked for"
                )
            return ids.to(self._device)
        if len(ids) and int(ids.max()) >= self.model.vocab_size:
            raise ValueError(
                f"the model chose token {int(ids.max())}: token ids are 0.."
                f"{self.model.vocab_size - 1}"
            )
        tensors.sampled[: len(ids)].copy_(ids)
        return None


class DeviceForward:
    """Runs the decoder of a device over all rows that the host has room for, padding too.

    max_choices  needed rows of a step, at most: the buffer of scores holds that many
    hidden       [L, hidden_size] of the step that was enqueued last, a buffer of the decoder's
    """

    def __init__(self, decoder: DeviceDecoder, max_choices: int) -> None:
        self.decoder = decoder
        self.hidden: torch.Tensor | None = None
        self._scores = torch.empty(
            max_choices, decoder.num_scores, dtype=torch.float32, device=decoder.place.device
        )

    def make_hidden(self, rows: int) -> torch.Tensor:
        """Zeroed rows as `hidden` has them."""
        decoder = self.decoder
        shape = (rows, decoder.shape.hidden_size)
        return torch.zeros(shape, dtype=decoder.dtype, device=decoder.place.device)

    def moved(self, moves: KvMoves) -> None:
        """See StepForward."""
        if self.decoder.ranks is not None:
            self.decoder.ranks.tell_moves(moves)

    def copied(self, copies: Sequence[Any]) -> None:
        """See StepForward."""
        if self.decoder.ranks is not None and copies:
            self.decoder.ranks.tell_copies(copies)

    def __call__(self, tensors: StepTensors) -> torch.Tensor | None:
        decoder, scores = self.decoder, tensors.needs_scores
        with decoder.together():
            hidden = self.hidden = decoder.forward_rows(tensors.step, scores=scores)
            if scores:
                return decoder.step_scores(hidden, self._scores[: len(hidden)])
            tensors.sampled.copy_(decoder.greedy(hidden))
        return None
