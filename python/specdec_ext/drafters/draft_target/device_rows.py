"""Which tokens a draft model reads in a step on a device: prompts, and before its first draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .device_forward import ChainRows

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.place import Place
    from ..slot_drafter import DraftInputs, PromptInputs
    from .draft_sizes import TextReads

__all__ = ["DeviceReader", "FirstPass", "PromptPacker"]


class PromptPacker:
    """The rows of prompts again, as far as the draft model has positions.

    max_rows, max_requests  of a step
    """

    def __init__(self, place: Place, reads: TextReads, *, max_rows: int, max_requests: int) -> None:
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._max_len, self._first = reads.max_len, reads.first
        self._row = torch.arange(max_rows, **how)
        self._cu_rows = torch.zeros(max_requests + 1, **how)

    def pack(self, prompts: PromptInputs) -> ChainRows:
        """As many rows as the step has, padding included; valid until the next call."""
        first, end, kv_len = prompts.cu_rows[:-1], prompts.cu_rows[1:], prompts.kv_len
        if self._first:
            kv_len = kv_len.clamp_min(self._first)
            first = torch.minimum(first + (kv_len - prompts.kv_len), end)
        count = torch.minimum(end - first, (self._max_len - kv_len).clamp_min(0))
        requests = count.shape[0]
        cu_rows = self._cu_rows[: requests + 1]
        torch.cumsum(count, 0, dtype=torch.int32, out=cu_rows[1:])
        row = self._row[: prompts.tokens.shape[0]]
        request = torch.searchsorted(cu_rows[1:], row, right=True)
        padding = request >= requests
        request = request.clamp_max(requests - 1)
        offset = (row - cu_rows.index_select(0, request)).masked_fill(padding, 0)
        source = (first.index_select(0, request) + offset).masked_fill(padding, 0)
        return ChainRows(
            tokens=prompts.tokens.index_select(0, source),
            positions=(kv_len.index_select(0, request) + offset).masked_fill(padding, 0),
            cu_rows=cu_rows,
            kv_len=kv_len,
            max_rows=prompts.max_rows,
        )


@dataclass(frozen=True)
class FirstPass:
    """What the first pass of a step reads: the golden token, and what is missing before it.

    cu_logits   [D + 1] int32, first score of each request; logit_rows [L] int32 their rows
    places      [D] int64, each request's score; too large for one that has none
    limit       [D] int32 drafts of each request
    """

    rows: ChainRows
    cu_logits: Tensor
    logit_rows: Tensor
    places: Tensor
    limit: Tensor


class DeviceReader:
    """The draft model reads the last tokens of each text in every step, the golden one last: as
    many as may be new to it.
    """

    def __init__(self, place: Place, reads: TextReads, *, max_requests: int) -> None:
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        rows = self._rows = reads.last
        self._max_len, self._max_requests = reads.max_len, max_requests
        self._shortest = rows + reads.first  # tokens of a text that is drafted for
        # Behind the rows there is room for what requests without rows would read.
        self._tokens = torch.zeros(max_requests + 1, rows, **how)
        self._positions = torch.zeros(max_requests + 1, rows, **how)
        self._cu_rows = torch.zeros(max_requests + 1, **how)
        self._cu_logits = torch.zeros(max_requests + 1, **how)
        self._last_rows = torch.arange(rows - 1, rows * max_requests, rows, **how)
        self._steps = torch.arange(rows, **how)

    def first(self, inputs: DraftInputs, last: Tensor, lens: Tensor, width: int) -> FirstPass:
        """last [D, rows] int32 the last tokens of each text; lens [D] int32 its length, 0: no
        drafts; width: drafts of any one request, at most."""
        requests = inputs.num_requests
        goes_on = (lens >= self._shortest) & (lens <= self._max_len)
        cu_logits = self._cu_logits[: requests + 1]
        torch.cumsum(goes_on, 0, dtype=torch.int32, out=cu_logits[1:])
        places = cu_logits[:-1].long().masked_fill(~goes_on, self._max_requests)
        kv_len = (lens - self._rows).clamp_min(0)
        self._tokens.index_copy_(0, places, last)
        self._positions.index_copy_(0, places, kv_len[:, None] + self._steps)
        limit = torch.minimum(inputs.max_drafts, self._max_len + 1 - lens).clamp_(0, width)
        rows = ChainRows(
            tokens=self._tokens.view(-1)[: self._rows * requests],
            positions=self._positions.view(-1)[: self._rows * requests],
            cu_rows=torch.mul(cu_logits, self._rows, out=self._cu_rows[: requests + 1]),
            kv_len=kv_len,
            max_rows=self._rows,
        )
        return FirstPass(rows, cu_logits, self._last_rows[:requests], places, limit * goes_on)
