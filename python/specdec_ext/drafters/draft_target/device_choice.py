"""How a step's drafts are chosen from a draft model's scores on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ... import ops
from .pick import pick_of

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.place import Place
    from ..slot_drafter import DraftInputs

__all__ = ["DraftChoice"]

_PICKS = {"best": 0, "coupled": 1, "own": 2}


class DraftChoice:
    """Chooses for each request by its law and its acceptance rule.

    num_columns   of scores that may become drafts
    vocab_ids     [num_columns] int32 their tokens; None: the columns' numbers
    vocab_size    of the target

    probs         what drafts were drawn from, by the step's requests
    """

    def __init__(
        self,
        place: Place,
        *,
        num_columns: int,
        vocab_ids: Tensor | None,
        vocab_size: int,
        max_drafts: int,
        max_requests: int,
    ) -> None:
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._place, self._num_columns = place, num_columns
        if vocab_ids is None and num_columns < vocab_size:
            vocab_ids = torch.arange(num_columns, **how)
        # By slot; the last one belongs to no request.
        self._how = torch.zeros(max_requests + 1, **how)
        self._ids, self._own_ids = (torch.zeros(max_requests, **how) for _ in range(2))
        zeros = torch.zeros(max_requests, device=place.device)
        # What greedy drafts are chosen by.
        self._greedy = ops.SamplingLaws(
            temperature=zeros,
            top_k=torch.zeros(max_requests, **how),
            top_p=torch.ones(max_requests, device=place.device),
            min_p=zeros,
            seed=torch.zeros(max_requests, dtype=torch.int64, device=place.device),
        )
        # By the requests of a step.
        self._has_probs = torch.zeros(max_requests, dtype=torch.uint8, device=place.device)
        self._columns = torch.zeros(max_requests, max_drafts, **how)
        self._probs = torch.zeros(max_requests, max_drafts, num_columns, device=place.device)
        columns = None if vocab_ids is None else self._columns
        self.probs = ops.DraftProbs(self._probs, vocab_ids, columns, self._has_probs)

    @property
    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._columns, self._probs))

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """options  of request/speculation.py; empty: no drafts are wanted"""
        self._how[slot].fill_(_PICKS[pick_of(options)])

    def begin(self, inputs: DraftInputs) -> None:
        """A step's drafts are about to be made."""
        if not inputs.samples:
            return
        slots = inputs.slot_ids.long().remainder(self._how.shape[0])  # -1: the last
        self._how_now = self._how.index_select(0, slots)
        self._has_probs.zero_()
        drawn = (self._how_now == _PICKS["own"]) & (inputs.laws.temperature > 0)
        self._has_probs[: drawn.shape[0]].copy_(drawn)

    def drawn(self, num_requests: int) -> Tensor:
        """[D] bool: whose drafts of this step are drawn from the draft model's law."""
        return self._has_probs[:num_requests] > 0

    def choose(
        self,
        scores: Tensor,
        cu_logits: Tensor,
        positions: Tensor,
        places: Tensor,
        inputs: DraftInputs,
        level: int,
    ) -> tuple[Tensor, Tensor]:
        """[D] int32 columns, -1 for scores that hold a NaN, and [D, num_columns] the scores.

        scores     [L, >= num_columns] float32; cu_logits [D + 1] int32
        positions  [L] int32 of the rows' tokens
        places     [D] int64 each request's row; of one that has none any row
        level      of the drafts, from 0
        """
        requests, rows = places.shape[0], scores.shape[0]
        scores = scores[:, : self._num_columns]
        laws = _first(self._greedy, requests)
        where = self._place.backend
        ids = self._ids[:rows]
        if inputs.samples:
            given = inputs.laws
            coupled = given.temperature.masked_fill(self._how_now != _PICKS["coupled"], 0.0)
            laws = dataclasses.replace(given, temperature=coupled)
        ops.sample_rows(scores, cu_logits, positions, laws, out=ids, backend=where)
        columns = ids.index_select(0, places)
        mine = scores.index_select(0, places)
        if inputs.samples:
            own = self._has_probs[:requests] > 0
            temperature = given.temperature.masked_fill(~own, 0.0)
            laws = dataclasses.replace(given, temperature=temperature)
            ids, probs = self._own_ids[:rows], self._probs[:requests, level]
            ops.sample_rows(
                scores, cu_logits, positions, laws, out=ids, probs=probs, purpose="draft",
                backend=where,
            )  # fmt: skip
            columns = torch.where(own, ids.index_select(0, places), columns)
            self._columns[:requests, level].copy_(columns)
        return columns.clamp_min(-1), mine  # -2: no column may be drawn


def _first(laws: ops.SamplingLaws, count: int) -> ops.SamplingLaws:
    return ops.SamplingLaws(
        temperature=laws.temperature[:count],
        top_k=laws.top_k[:count],
        top_p=laws.top_p[:count],
        min_p=laws.min_p[:count],
        seed=laws.seed[:count],
    )
