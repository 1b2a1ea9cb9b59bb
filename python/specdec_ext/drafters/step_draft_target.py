"""Draft-target decoding on the stream of a step: chains of a second model.

The draft model has pages of its own with the ids of the target's, so a request's page table names
both, and whoever shares a page of the target shares the draft model's. A step's first pass reads
what the draft model has not read of a text, the golden token last; each further pass reads the
draft that the one before chose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from .step_draft_choice import DraftChoice
from .step_draft_forward import ChainRows, DraftForward
from .step_draft_rows import DeviceReader, HostReader, PromptPacker, Reader
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
    # Rows of each request in a pass, at most: on a device, where every step reads what is new.
    reads = DeviceReader.ROWS

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
        self._prompts = PromptPacker(
            place, max_rows=max_rows, max_requests=max_requests, max_len=self._max_len
        )
        sizes = {"max_requests": max_requests, "max_len": self._max_len}
        self.reader: Reader
        if place.is_cpu:
            self.reader = HostReader(max_rows=max_rows, **sizes)
        else:
            self.reader = DeviceReader(place, **sizes)
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        drafts = config.max_draft_len
        self._last = torch.zeros(max_requests, 2, **how)
        self._lens = torch.zeros(max_requests, **how)
        self._cu_rows = torch.zeros(max_requests + 1, **how)
        # Rows of a pass behind the first; the last is that of requests without one.
        self._tokens = torch.zeros(max_requests + 1, **how)
        self._positions = torch.zeros(max_requests + 1, **how)
        # Did the draft model give the last draft of each request min_confidence?
        self._sure = torch.ones(max_requests, dtype=torch.bool, device=place.device)
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
            "memory_bytes": held + self.forward.memory_bytes + self.choice.memory_bytes,
            "device": self._place.name,
            "model": str(self.model.info.path),
            "num_forward_passes": self.forward.num_passes,
            "rows": self.forward.num_rows,
        }

    @torch.inference_mode()
    def read_prompts(self, prompts: PromptInputs) -> None:
        """See StepDrafter."""
        rows, ends = self._prompts.pack(prompts)
        if rows is not None:
            self._read(
                rows,
                prompts.page_table,
                self._cu_rows[: ends.shape[0] + 1].zero_(),
                self._cu_rows[:0] if self._place.is_cpu else self._cu_rows[:1],
                needs_scores=False,
                max_kv_len=prompts.max_kv_len,
            )
        self.reader.prompts(prompts.slot_ids, ends)

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
        self.choice.begin(inputs)
        first = self.reader.first(inputs, last, lens, width)
        if first is None:
            return
        result = self._read(
            first.rows,
            inputs.page_table,
            first.cu_logits,
            first.logit_rows,
            needs_scores=self._needs_scores(inputs),
            max_kv_len=inputs.max_kv_len,
        )
        self.reader.read()
        active = first.limit > 0
        positions = first.rows.positions.index_select(0, first.logit_rows)
        drafts = lens.new_full((requests, width), -1)
        drafts[:, 0].copy_(
            self._pick(result, positions, first.cu_logits, first.places, active, inputs, 0)
        )
        for level in range(1, width):
            active = (first.limit > level) & (drafts[:, level - 1] >= 0)
            if self.config.min_confidence > 0:
                active = active & self._sure[:requests]
            if not self._follow(inputs, lens + (level - 1), active, drafts, level):
                break
        self.reader.drafted(drafts)
        ops.bring_drafts(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            drafts,
            vocab_size=self._vocab_size,
            backend=self._place.backend,
            status=inputs.status,
        )

    def _follow(
        self, inputs: DraftInputs, at: Tensor, active: Tensor, drafts: Tensor, level: int
    ) -> bool:
        """One pass that reads drafts [D, width] of the level before, at these positions [D]: those
        of the requests that go on. False: nobody does."""
        requests = inputs.num_requests
        cu_rows = self._cu_rows[: requests + 1]
        torch.cumsum(active, 0, dtype=torch.int32, out=cu_rows[1:])
        count = int(cu_rows[requests]) if self._place.is_cpu else requests
        if count == 0:
            return False
        places = cu_rows[:-1].long().masked_fill(~active, self._tokens.shape[0] - 1)
        self._tokens.index_copy_(0, places, drafts[:, level - 1])
        self._positions.index_copy_(0, places, at)
        rows = ChainRows(self._tokens[:count], self._positions[:count], None, cu_rows, at, 1)
        result = self._read(
            rows,
            inputs.page_table,
            cu_rows,
            None,
            needs_scores=self._needs_scores(inputs),
            max_kv_len=inputs.max_kv_len,
        )
        chosen = self._pick(result, rows.positions, cu_rows, places, active, inputs, level)
        drafts[:, level].copy_(chosen)
        return True

    def _read(self, rows: ChainRows, *where: Any, **how: Any) -> Tensor:
        """A pass of the draft model, which has ids of its own."""
        if self._input_ids is not None:
            tokens = self._input_ids.index_select(0, rows.tokens)
            rows = dataclasses.replace(rows, tokens=tokens)
        return self.forward(rows, *where, **how)

    def _needs_scores(self, inputs: DraftInputs) -> bool:
        return inputs.needs_scores or self.config.min_confidence > 0

    def _pick(
        self,
        result: Tensor,
        positions: Tensor,
        cu_logits: Tensor,
        places: Tensor,
        wanted: Tensor,
        inputs: DraftInputs,
        level: int,
    ) -> Tensor:
        """[D] int32 the drafts of a level, -1 for a request that wants none, and for scores that
        hold a NaN.

        result     of a pass, ids [L] or scores [L, num_scores]; positions [L] of their rows
        cu_logits, places  as in FirstPass
        """
        if result.shape[0] == 0:
            return torch.full_like(inputs.slot_ids, -1)
        places = places.clamp_max(result.shape[0] - 1)
        if self._needs_scores(inputs):
            columns, scores = self.choice.choose(
                result, cu_logits, positions, places, inputs, level
            )
            if self.config.min_confidence > 0:
                self._end_unsure(columns, scores)
        else:
            columns = result.index_select(0, places)
            if self.forward.num_scores > self._num_columns:
                columns = columns.masked_fill(columns >= self._num_columns, -1)
        columns = columns.masked_fill(~wanted, -1)
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
