"""A draft model's passes on a device over rows that operations of a step have made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...models.device_step import DeviceStep

if TYPE_CHECKING:
    from torch import Tensor

    from ...models import StepModel
    from ...models.place import Place

__all__ = ["ChainRows", "DraftForward", "DrafterForward"]


@dataclass(frozen=True)
class ChainRows:
    """Rows of a pass: those of D requests one after another, each request's at positions in a row;
    then padding, whose tokens and positions are valid ones.

    tokens, positions  [R] int32
    cu_rows    [D + 1] int32
    kv_len     [D] int32 position of each request's first row
    max_rows   of any one request, an upper bound that the host knows
    mask, is_tree  [R, 4] int32 and [D] uint8 of rows that are nodes of trees; None: chains
    """

    tokens: Tensor
    positions: Tensor
    cu_rows: Tensor
    kv_len: Tensor
    max_rows: int
    mask: Tensor | None = None
    is_tree: Tensor | None = None


class DrafterForward(Protocol):
    """What drafts in passes over rows: a draft model, or a head on the target's states.

    takes_sources  its rows need to know which row of the pass before they follow
    """

    takes_sources: bool
    num_scores: int
    num_passes: int
    num_rows: int

    @property
    def memory_bytes(self) -> int: ...

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None: ...

    def __call__(
        self,
        rows: ChainRows,
        page_table: Tensor,
        logit_rows: Tensor | None,
        *,
        needs_scores: bool,
        max_kv_len: int,
        sources: Tensor | None = None,
    ) -> Tensor: ...


class DraftForward:
    """Runs the draft model's decoder over all rows, padding too.

    max_rows, max_requests  of a pass
    max_scores              rows of a pass whose scores are needed
    """

    takes_sources = False  # a row is its token and what stands in front of it

    def __init__(
        self,
        model: StepModel,
        place: Place,
        *,
        max_rows: int,
        max_requests: int,
        max_scores: int,
    ) -> None:
        self.model = model
        self.num_scores: int = getattr(model, "num_scores", model.vocab_size)
        self.num_passes = self.num_rows = 0
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._mask = torch.zeros(max_rows, 4, **how)
        self._is_tree = torch.zeros(max_requests, dtype=torch.uint8, device=place.device)
        self._status = torch.zeros(max_requests, **how)
        self._scores = torch.zeros(max_scores, self.num_scores, device=place.device)

    @property
    def memory_bytes(self) -> int:
        kept = (self._mask, self._is_tree, self._scores)
        return sum(t.numel() * t.element_size() for t in kept)

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """The draft model's pages [layers, P, G, S, K]."""
        self.model.bind_cache(k_pages, v_pages)

    def __call__(
        self,
        rows: ChainRows,
        page_table: Tensor,
        logit_rows: Tensor | None,
        *,
        needs_scores: bool,
        max_kv_len: int,
        sources: Tensor | None = None,
    ) -> Tensor:
        """K/V of the rows into the pages; ids int32 [L] or scores [L, num_scores] of logit_rows,
        None: of all. Valid until the next call."""
        assert sources is None  # a head's
        count, requests = rows.tokens.shape[0], rows.kv_len.shape[0]
        self.num_passes += 1
        self.num_rows += count
        step = DeviceStep(
            tokens=rows.tokens,
            positions=rows.positions,
            mask=self._mask[:count] if rows.mask is None else rows.mask,  # chains need none
            cu_rows=rows.cu_rows,
            kv_len=rows.kv_len,
            is_tree=self._is_tree[:requests] if rows.is_tree is None else rows.is_tree,
            page_table=page_table,
            logit_rows=logit_rows,
            status=self._status[:requests],
            max_rows=rows.max_rows,
            max_kv_len=max_kv_len,
        )
        decoder = self.model.decoder  # type: ignore[attr-defined]  # a device's model
        hidden = decoder.forward_rows(step)
        if not needs_scores:
            return decoder.greedy(hidden)  # type: ignore[no-any-return]
        return decoder.scores(hidden, self._scores[: len(hidden)])  # type: ignore[no-any-return]
