"""Draft-target decoding on the stream of a step: chains of a second model.

The draft model has pages of its own with the ids of the target's, so a request's page table names
both, and whoever shares a page of the target shares the draft model's. A slot remembers how far the
draft model has read its text: a step's first pass reads what is missing, the golden token last, and
each further pass reads the draft that the one before chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from .step_draft_choice import DraftChoice
from .step_draft_forward import DraftForward, PackedRows, RowPacker
from .step_drafter import DraftInputs, PromptInputs

if TYPE_CHECKING:
    from torch import Tensor

    from ..drafter_config import DraftTargetDecodingConfig
    from ..models import StepModel
    from ..models.place import Place
    from .vocabulary import VocabularyMap

__all__ = ["StepDraftTarget"]


class StepDraftTarget:
    """A StepDrafter around a second StepModel; see bind_cache().

    place         of both models
    vocab_size    of the target
    max_requests  slots of the engine
    max_rows      of a step of the engine, and of one pass of the draft model
    pages         K and V of the draft model, [layers, P, G, S, K]; None: not bound yet
    """

    name = "draft_target"
    needs_hidden = False
    drafts_one_by_one = True
    # Tokens that the first pass reads of each request on a device: the last draft of a step that
    # accepted all of them, and the golden token. There every step's tokens are read at once.
    reads = 2

    def __init__(
        self,
        config: DraftTargetDecodingConfig,
        model: StepModel,
        vocabulary: VocabularyMap,
        place: Place,
        *,
        vocab_size: int,
        max_requests: int,
        max_rows: int,
    ) -> None:
        self.config, self.model = config, model
        self.reads_every_step = not place.is_cpu
        self._place, self._max_rows = place, max_rows
        self._vocab_size, self._max_len = vocab_size, model.max_position
        self.forward = DraftForward(model, place, max_rows=max_rows, max_requests=max_requests)
        self._packer = RowPacker(max_rows, max_requests, place)
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        drafts = config.max_draft_len
        # Of each slot, the last is nobody's. First a position: the K/V in front of it is that of
        # the text's tokens. Then the drafts whose K/V lies behind, -1: none.
        self._known = torch.full((max_requests + 1, 1 + drafts), -1, **how)
        self._last = torch.zeros(max_requests, 1, **how)
        self._lens = torch.zeros(max_requests, **how)
        self._cu_logits = torch.zeros(max_requests + 1, **how)
        self._logit_rows = torch.zeros(max_requests + 1, **how)
        self._logit_positions = torch.zeros(max_requests + 1, **how)
        # Did the draft model give the last draft of each request min_confidence?
        self._sure = torch.ones(max_requests, dtype=torch.bool, device=place.device)
        self._requests = torch.arange(max_requests, **how)
        self._places = torch.arange(drafts, **how)
        self._input_ids = _table(vocabulary.input_ids, place)
        self._output_ids = _table(vocabulary.output_ids, place)
        self._num_columns = vocabulary.num_scores
        self.choice = DraftChoice(
            place,
            num_columns=vocabulary.num_scores,
            vocab_ids=self._output_ids,
            vocab_size=vocab_size,
            max_drafts=drafts,
            max_requests=max_requests,
            max_rows=max_rows,
        )
        self.forward.make_scores()
        self.pages: tuple[Tensor, Tensor] | None = None

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """Pages of the draft model, [layers, P, G, S, K], as many as the target has."""
        self.forward.bind_cache(k_pages, v_pages)
        self.pages = (k_pages, v_pages)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See StepDrafter. What its slot's prompt begins with is known when it is read."""
        self.choice.enter(slot, options)

    def draft_probs(self, cu_logits: Tensor, first: int, num_rows: int) -> ops.DraftProbs | None:
        """See StepDrafter."""
        return self.choice.probs(cu_logits, first, num_rows)

    def stats(self) -> Mapping[str, Any]:
        """See StepDrafter."""
        held = 0 if self.pages is None else sum(t.numel() * t.element_size() for t in self.pages)
        return {
            "memory_bytes": held
            + self._known.numel() * 4
            + self.forward.memory_bytes
            + self.choice.memory_bytes,
            "device": self._place.name,
            "model": str(self.model.info.path),
            "num_forward_passes": self.forward.num_passes,
            "rows": self.forward.num_rows,
        }

    @torch.inference_mode()
    def read_prompts(self, prompts: PromptInputs) -> None:
        """See StepDrafter."""
        first = prompts.cu_rows[:-1]
        count = torch.minimum(
            prompts.cu_rows[1:] - first, (self._max_len - prompts.kv_len).clamp_min(0)
        )
        packed = self._packer.pack(prompts.kv_len, count, len(prompts.tokens))
        if packed is not None:
            kept = first - prompts.kv_len  # from a position to its row of the step
            rows = kept.index_select(0, packed.request) + packed.positions
            tokens = prompts.tokens.index_select(0, rows.masked_fill(~packed.is_row, 0))
            self.forward(
                self._ids(tokens),
                packed,
                prompts.page_table,
                prompts.kv_len,
                self._cu_logits[: len(count) + 1].zero_(),
                self._logit_rows[: 0 if self._place.is_cpu else 1].zero_(),
                needs_scores=False,
                max_rows=prompts.max_rows,
                max_kv_len=prompts.max_kv_len,
            )
        known = self._known.new_full((len(count), self._known.shape[1]), -1)
        known[:, 0].copy_(prompts.kv_len + count)
        self._known.index_copy_(0, self._slots(prompts.slot_ids), known)

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs) -> None:
        """See StepDrafter."""
        requests = inputs.num_requests
        width = min(inputs.max_width, self.config.max_draft_len)
        last, lens = self._last[:requests], self._lens[:requests]
        ops.recent_tokens(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            tokens=last,
            lens=lens,
            backend=self._place.backend,
        )
        slots = self._slots(inputs.slot_ids)
        self.choice.begin(inputs, slots)
        goes_on = (lens > 0) & (lens <= self._max_len)
        known = self._known.index_select(0, slots)
        start = self._read_so_far(inputs, known, lens)
        missing = (lens - start) * goes_on
        most = max(self.reads, self._max_rows // requests if self._place.is_cpu else 0)
        count = missing.clamp_max(most)
        # A draft at position p comes of a pass that reads p - 1.
        limit = torch.minimum(inputs.max_drafts, self._max_len - lens + 1).clamp_(0, width)
        limit = limit * (goes_on & (missing <= most))
        packed = self._packer.pack(start, count, min(requests * most, self._max_rows))
        if packed is None:
            return
        text = self._history(inputs, packed.request, packed.positions.long())
        text = self._ids(text.masked_fill(~packed.is_row, 0))
        token = self._choose(
            inputs, text, packed, start, lens, limit > 0, min(most, inputs.max_kv_len), 0
        )
        drafts = known.new_full((requests, max(width, 1)), -1)
        # Until they are there nothing is known of what lies behind the text.
        self._keep(slots, known, start + count, drafts, goes_on)
        drafts[:, 0].copy_(token)
        active = goes_on
        for done in range(1, width):
            active = active & (limit > done) & (token >= 0) & self._sure[:requests]
            packed = self._packer.pack(lens + (done - 1), active.to(torch.int32), requests)
            if packed is None:
                break
            rows = self._ids(token.index_select(0, packed.request).masked_fill(~packed.is_row, 0))
            at = lens + (done - 1)
            token = self._choose(inputs, rows, packed, at, at + 1, active, 1, done)
            drafts[:, done].copy_(token)
        self._keep(slots, known, start + count, drafts, goes_on)
        ops.bring_drafts(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            drafts,
            vocab_size=self._vocab_size,
            backend=self._place.backend,
            status=inputs.status,
        )

    def _slots(self, slot_ids: Tensor) -> Tensor:
        """[D] int64, -1 as the place that is nobody's."""
        return slot_ids.long().remainder(len(self._known))

    def _history(self, inputs: DraftInputs, request: Tensor, at: Tensor) -> Tensor:
        """int32 of the shape of `at`, int64: tokens of the requests' texts, within them."""
        words = inputs.slots.view(torch.int32)
        slots = inputs.slot_ids.long().clamp_min(0).index_select(0, request).view(len(at), -1)
        places = slots * words.shape[1] + inputs.layout.history_offset // 4 + at.view(len(at), -1)
        return words.view(-1).index_select(0, places.flatten()).view(at.shape)

    def _ids(self, tokens: Tensor) -> Tensor:
        if self._input_ids is None:
            return tokens
        return self._input_ids.index_select(0, tokens)

    def _read_so_far(self, inputs: DraftInputs, known: Tensor, lens: Tensor) -> Tensor:
        """[D] int32: how many tokens of each text need not be read, all but the last at most."""
        read, tail = known[:, 0], known[:, 1:]
        at = read[:, None] + self._places
        within = (at >= 0) & (at < lens[:, None])
        everybody = self._requests[: len(lens)]
        text = self._history(inputs, everybody, at.masked_fill(~within, 0).long())
        came_true = ((tail == text) & within).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
        return torch.minimum(read + came_true, lens - 1).clamp_min(0)

    def _keep(
        self, slots: Tensor, old: Tensor, read: Tensor, drafts: Tensor, goes_on: Tensor
    ) -> None:
        """What is known of the slots now; of each chain all drafts but the last were read."""
        known = torch.full_like(old, -1)
        known[:, 0].copy_(read)
        if drafts.shape[1] > 1:
            tail = drafts[:, :-1].masked_fill(drafts[:, 1:] < 0, -1)
            known[:, 1 : 1 + tail.shape[1]].copy_(tail)
        self._known.index_copy_(0, slots, torch.where(goes_on[:, None], known, old))

    def _choose(
        self,
        inputs: DraftInputs,
        tokens: Tensor,
        packed: PackedRows,
        kv_len: Tensor,
        end: Tensor,
        wanted: Tensor,
        max_rows: int,
        level: int,
    ) -> Tensor:
        """One pass: [D] int32 the draft after the last row of each request that wants one, else
        -1; -1 too for scores that hold a NaN.

        kv_len, end  [D] int32 positions of a request's first row and behind its last
        """
        requests = len(kv_len)
        cu_logits = self._cu_logits[: requests + 1]
        torch.cumsum(wanted, 0, dtype=torch.int32, out=cu_logits[1:])
        # Behind the last choice: a row that is there, for nobody.
        places = cu_logits[:-1].long().masked_fill(~wanted, requests)
        last = packed.cu_rows[1:] - 1
        logit_rows = self._logit_rows[: requests + 1].zero_().index_copy_(0, places, last)
        needs_scores = inputs.needs_scores or self.config.min_confidence > 0
        result = self.forward(
            tokens,
            packed,
            inputs.page_table,
            kv_len,
            cu_logits,
            logit_rows[:requests],
            needs_scores=needs_scores,
            max_rows=max_rows,
            max_kv_len=inputs.max_kv_len,
        )
        if len(result) == 0:
            return torch.full_like(kv_len, -1)
        mine = places.clamp_max(len(result) - 1)
        if needs_scores:
            at = self._logit_positions[: requests + 1].zero_().index_copy_(0, places, end - 1)
            columns, scores = self.choice.choose(
                result, cu_logits, at[: len(result)], mine, inputs, level
            )
            if self.config.min_confidence > 0:
                self._end_unsure(columns, scores)
        else:
            columns = result.index_select(0, mine)
        columns = columns.masked_fill(~wanted | (columns >= self._num_columns), -1)
        if self._output_ids is None:
            return columns
        chosen = self._output_ids.index_select(0, columns.clamp_min(0))
        return chosen.masked_fill(columns < 0, -1)

    def _end_unsure(self, columns: Tensor, scores: Tensor) -> None:
        """No pass follows a draft to which the draft model gives less than min_confidence."""
        chosen = scores.gather(1, columns.clamp_min(0)[:, None].long())[:, 0]
        probability = (chosen - scores.logsumexp(1)).exp()
        self._sure[: len(columns)].copy_(probability >= self.config.min_confidence)


def _table(ids: list[int], place: Place) -> Tensor | None:
    return torch.tensor(ids, dtype=torch.int32, device=place.device) if ids else None
