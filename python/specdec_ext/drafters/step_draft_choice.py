"""How a step's drafts are chosen from a draft model's scores, and what they were drawn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import ops

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.place import Place
    from .step_drafter import DraftInputs

__all__ = ["DraftChoice"]

# The likeliest token; the target's own draw, with its number; a draw of the draft model's own.
_BEST, _COUPLED, _OWN = 0, 1, 2


class DraftChoice:
    """Of each request by its law and its acceptance rule.

    num_columns   of scores that may become drafts
    vocab_ids     [num_columns] int32 their tokens; None: the columns' numbers
    vocab_size    of the target
    max_rows      choices of a step of the target
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
        max_rows: int,
    ) -> None:
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._place, self._num_columns, self._max_drafts = place, num_columns, max_drafts
        self._max_rows = min(max_rows, max_requests * (1 + max_drafts))
        if vocab_ids is None and num_columns < vocab_size:
            vocab_ids = torch.arange(num_columns, **how)
        self._vocab_ids = vocab_ids
        # Of each slot, the last is nobody's.
        self._how = torch.zeros(max_requests + 1, **how)
        self._draws_own = [False] * max_requests
        self._ids, self._own_ids = (torch.zeros(max_requests, **how) for _ in range(2))
        zeros = torch.zeros(max_requests, device=place.device)
        # What greedy drafts are chosen by, and draws of the draft model's own beside the
        # temperature: q need not be cut as the target's law is.
        self._greedy = ops.SamplingLaws(
            temperature=zeros,
            top_k=torch.zeros(max_requests, **how),
            top_p=torch.ones(max_requests, device=place.device),
            min_p=zeros,
            seed=torch.zeros(max_requests, dtype=torch.int64, device=place.device),
        )
        # Of the requests of a step.
        self._has_probs = torch.zeros(max_requests, dtype=torch.uint8, device=place.device)
        self._columns = torch.zeros(max_drafts, max_requests, **how)
        self._probs: Tensor | None = None  # [max_drafts, max_requests, num_columns]
        self._prob_rows: Tensor | None = None  # [rows of the target, num_columns]
        self._row = torch.arange(self._max_rows, **how)
        if not place.is_cpu:
            self._make_probs()

    @property
    def memory_bytes(self) -> int:
        kept = (self._columns, self._probs, self._prob_rows)
        return sum(t.numel() * t.element_size() for t in kept if t is not None)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """options  of DraftTargetDecodingConfig.request_kwargs; empty: no drafts are wanted"""
        how, acceptance = _BEST, options.get("acceptance")
        if acceptance == "exact_match":
            how = _COUPLED
        elif acceptance in ("rejection", "threshold") and options["use_draft_logits"]:
            how = _OWN
            self._make_probs()
        self._draws_own[slot] = how == _OWN
        self._how[slot].fill_(how)

    def begin(self, inputs: DraftInputs) -> None:
        """A step's drafts are about to be made."""
        if not inputs.needs_scores:
            return
        slots = inputs.slot_ids.long().remainder(self._how.shape[0])  # -1: the last
        self._how_now = self._how.index_select(0, slots)
        self._has_probs.zero_()
        if self._probs is not None:
            drawn = (self._how_now == _OWN) & (inputs.laws.temperature > 0)
            self._has_probs[: drawn.shape[0]].copy_(drawn)

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
        if inputs.needs_scores:
            given = inputs.laws
            coupled = given.temperature.masked_fill(self._how_now != _COUPLED, 0.0)
            laws = dataclasses.replace(given, temperature=coupled)
        ops.sample_rows(scores, cu_logits, positions, laws, out=ids, backend=where)
        columns = ids.index_select(0, places)
        mine = scores.index_select(0, places)
        if inputs.needs_scores and self._probs is not None:
            own = self._has_probs[:requests] > 0
            temperature = given.temperature.masked_fill(~own, 0.0)
            laws = dataclasses.replace(
                _first(self._greedy, requests), temperature=temperature, seed=given.seed
            )
            ids = self._own_ids[:rows]
            ops.sample_rows(
                scores, cu_logits, positions, laws, out=ids, purpose="draft", backend=where
            )
            columns = torch.where(own, ids.index_select(0, places), columns)
            self._columns[level, :requests].copy_(columns)
            heat = temperature.masked_fill(~own, 1.0)[:, None]
            torch.softmax(mine / heat, -1, out=self._probs[level, :requests])
        return columns.clamp_min(-1), mine  # -2: no column may be drawn

    def probs(self, cu_logits: Tensor, first: int, num_rows: int) -> ops.DraftProbs | None:
        """What the drafts among a step's choices were drawn from; None: all without chance.

        cu_logits  [B + 1] int32 of the step's requests, those that decode from `first` on
        """
        if self._probs is None or (self._place.is_cpu and not any(self._draws_own)):
            return None
        assert self._prob_rows is not None
        requests, rows = len(cu_logits) - 1, self._row[:num_rows]
        request = torch.searchsorted(cu_logits[1:], rows, right=True).clamp_max(requests - 1)
        level = rows - cu_logits.index_select(0, request) - 1
        is_draft = (request >= first) & (level >= 0) & (level < self._max_drafts)
        source = (level * self._columns.shape[1] + request - first).masked_fill(~is_draft, 0)
        probs = self._prob_rows[:num_rows]
        torch.index_select(self._probs.view(-1, self._num_columns), 0, source, out=probs)
        has_probs = self._has_probs[:requests]
        if first:
            has_probs = torch.cat(
                (torch.zeros_like(has_probs[:first]), self._has_probs[: requests - first])
            )
        columns = None
        if self._vocab_ids is not None:
            columns = self._columns.view(-1).index_select(0, source)
        return ops.DraftProbs(probs, self._vocab_ids, columns, has_probs)

    def _make_probs(self) -> None:
        if self._probs is None:
            requests, columns = self._columns.shape[1], self._num_columns
            device = self._place.device
            self._probs = torch.zeros(self._max_drafts, requests, columns, device=device)
            self._prob_rows = torch.zeros(self._max_rows, columns, device=device)


def _first(laws: ops.SamplingLaws, count: int) -> ops.SamplingLaws:
    return ops.SamplingLaws(
        temperature=laws.temperature[:count],
        top_k=laws.top_k[:count],
        top_p=laws.top_p[:count],
        min_p=laws.min_p[:count],
        seed=laws.seed[:count],
    )
