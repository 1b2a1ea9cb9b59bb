"""A draft model on a device, chains: everything that a step launches follows from its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import ops
from ..slot_drafter import DraftInputs
from .device_choice import DraftChoice
from .device_forward import ChainRows
from .device_side import DeviceSide

if TYPE_CHECKING:
    from torch import Tensor

    from ...config.grown_tree import GrownTreeConfig
    from ...models.place import Place
    from ..vocabulary import VocabularyMap
    from .device_apart import OwnDevice
    from .device_side import MakeForward
    from .draft_sizes import DraftSizes, TextReads

__all__ = ["DevicePasses"]


class DevicePasses(DeviceSide):
    """Chains; see DeviceSide."""

    def __init__(
        self,
        config: GrownTreeConfig,
        vocabulary: VocabularyMap,
        place: Place,
        sizes: DraftSizes,
        reads: TextReads,
        make_forward: MakeForward,
        own_device: OwnDevice | None = None,
    ) -> None:
        max_requests = sizes.max_requests
        super().__init__(
            config, vocabulary, place, sizes, reads, make_forward, own_device,
            max_scores=max_requests,
        )  # fmt: skip
        # Rows of a pass after the first; the last is that of requests without one.
        self._tokens = torch.zeros(max_requests + 1, **self._ints)
        self._positions = torch.zeros(max_requests + 1, **self._ints)
        # The row of the pass before that each of them follows; each request's last row.
        self._sources = torch.zeros(max_requests + 1, **self._ints)
        self._newest = torch.zeros(max_requests, **self._ints)
        # What the draft model gave the last draft of each request; the same as an estimate.
        self._weighs = False
        self._confidence, self._share = torch.ones(2, max_requests, device=place.device)
        self.choice = DraftChoice(
            place,
            num_columns=vocabulary.num_scores,
            vocab_ids=self._output_ids,
            vocab_size=sizes.vocab_size,
            max_drafts=config.max_draft_len,
            max_requests=max_requests,
        )
        if own_device is not None:
            own_device.mirror(self.choice.probs)

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + self.choice.memory_bytes

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter."""
        if self._own is None:
            return self.choice.enter(slot, options)
        self._own.enter(slot, options)
        self._own.run(lambda: self.choice.enter(slot, options))
        return None

    def draft_probs(self, num_requests: int) -> ops.DraftProbs:
        """See SlotDrafter."""
        if self._own is not None:
            return self._own.draft_probs(num_requests)
        return self.choice.probs.first(num_requests)

    def _make(
        self, inputs: DraftInputs, last: Tensor, lens: Tensor, *, wants_survival: bool
    ) -> list[Tensor]:
        requests = inputs.num_requests
        self._weighs = wants_survival or self.config.min_confidence > 0
        width = min(inputs.max_width, self.config.max_draft_len)
        self.choice.begin(inputs)
        first, result = self._read_texts(
            inputs, last, lens, width, needs_scores=self._needs_scores(inputs)
        )
        has_pages = inputs.page_table.amax(1) < self._num_pages
        limit = first.limit * has_pages
        active = limit > 0
        if self.forward.takes_sources:
            rows = first.places.clamp_max(requests - 1)
            self._newest[:requests].copy_(first.logit_rows.index_select(0, rows))
        positions = first.rows.positions.index_select(0, first.logit_rows)
        drafts = lens.new_full((requests, width), -1)
        survival = torch.full_like(drafts, -1.0, dtype=torch.float32) if self._weighs else None
        drafts[:, 0].copy_(
            self._pick(result, positions, first.cu_logits, first.places, active, inputs, 0)
        )
        if survival is not None:
            survival[:, 0].copy_(self._share[:requests])
        for level in range(1, width):
            active = (limit > level) & (drafts[:, level - 1] >= 0)
            if self.config.min_confidence > 0:
                active = active & (self._confidence[:requests] >= self.config.min_confidence)
            self._follow(inputs, lens + (level - 1), active, drafts, level)
            if survival is not None:  # unknown after what is unknown
                above, share = survival[:, level - 1], self._share[:requests]
                unknown = (above < 0) | (share < 0)
                survival[:, level].copy_((above * share).masked_fill(unknown, -1.0))
        return [drafts] if survival is None else [drafts, survival]

    def _probs_of(self, inputs: DraftInputs) -> ops.DraftProbs | None:
        return self.choice.probs if inputs.samples else None

    def _propose(self, inputs: DraftInputs, made: Sequence[Tensor]) -> None:
        drafts, *survival = made
        ops.propose_drafts(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            drafts,
            survival=survival[0] if survival else None,
            vocab_size=self._vocab_size,
            backend=self._home.backend,
            status=inputs.status,
        )

    def _follow(
        self, inputs: DraftInputs, at: Tensor, active: Tensor, drafts: Tensor, level: int
    ) -> None:
        """One pass that reads drafts [D, width] of the level before, at these positions [D]: those
        of the requests that go on."""
        requests = inputs.num_requests
        cu_rows = self._cu_rows[: requests + 1]
        torch.cumsum(active, 0, dtype=torch.int32, out=cu_rows[1:])
        places = cu_rows[:-1].long().masked_fill(~active, self._tokens.shape[0] - 1)
        self._tokens.index_copy_(0, places, drafts[:, level - 1])
        self._positions.index_copy_(0, places, at)
        sources = None
        if self.forward.takes_sources:
            sources = self._sources[:requests]
            self._sources.index_copy_(0, places, self._newest[:requests])
            self._newest[:requests].copy_(places.clamp_max(requests - 1))
        rows = ChainRows(self._tokens[:requests], self._positions[:requests], cu_rows, at, 1)
        result = self._read(
            rows,
            inputs.page_table,
            None,
            needs_scores=self._needs_scores(inputs),
            max_kv_len=inputs.max_kv_len,
            sources=sources,
        )
        chosen = self._pick(result, rows.positions, cu_rows, places, active, inputs, level)
        drafts[:, level].copy_(chosen)

    def _needs_scores(self, inputs: DraftInputs) -> bool:
        return inputs.samples or self._weighs

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
        places = places.clamp_max(result.shape[0] - 1)
        if self._needs_scores(inputs):
            columns, scores = self.choice.choose(
                result, cu_logits, positions, places, inputs, level
            )
            if self._weighs:
                self._weigh(columns, scores, inputs)
        else:
            columns = result.index_select(0, places)
            if self.forward.num_scores > self._num_columns:
                columns = columns.masked_fill(columns >= self._num_columns, -1)
        columns = columns.masked_fill(~wanted, -1)
        if self._output_ids is None:
            return columns
        chosen = self._output_ids.index_select(0, columns.clamp_min(0))
        return chosen.masked_fill(columns < 0, -1)

    def _weigh(self, columns: Tensor, scores: Tensor, inputs: DraftInputs) -> None:
        """What the draft model gives to these drafts. What a drawn draft turned out to be must not
        decide whether it is verified: there is no estimate of it."""
        requests = len(columns)
        chosen = scores.gather(1, columns.clamp_min(0)[:, None].long())[:, 0]
        confidence = self._confidence[:requests]
        confidence.copy_((chosen - scores.logsumexp(1)).exp())
        share = self._share[:requests].copy_(confidence)
        if inputs.samples:
            share.masked_fill_(self.choice.drawn(requests), -1.0)
