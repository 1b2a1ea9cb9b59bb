"""A draft model in steps that run where they are enqueued: on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import _core, ops
from .pick import pick_of

if TYPE_CHECKING:
    from ...config.grown_tree import GrownTreeConfig
    from ...models import StepModel
    from ..slot_drafter import DraftInputs, PromptInputs
    from ..vocabulary import VocabularyMap
    from .draft_sizes import DraftSizes

__all__ = ["HostPasses"]


class HostPasses:
    """Rows and choices are made by _core.DraftPasses; this runs the model in between.

    takes_features  the model is a head on the target's states (_core.DraftPasses.sources)
    """

    def __init__(
        self,
        config: GrownTreeConfig,
        model: StepModel,
        vocabulary: VocabularyMap,
        sizes: DraftSizes,
        *,
        takes_features: bool = False,
    ) -> None:
        self.model = model
        self.num_passes = self.num_rows = 0
        self.passes_made = 0  # by the last draft()
        self._top_k, self._min_confidence = config.top_k, config.min_confidence
        self.passes = _core.DraftPasses(
            vocab_size=sizes.vocab_size,
            num_scores=vocabulary.num_scores,
            num_slots=sizes.max_requests,
            max_rows=sizes.max_rows,
            max_len=model.max_position,
            max_drafts=config.max_draft_len,
            top_k=config.top_k,
            max_depth=config.max_draft_path_len,
            min_confidence=config.min_confidence,
            input_ids=vocabulary.input_ids,
            output_ids=vocabulary.output_ids,
            takes_features=takes_features,
        )
        self._vocab_ids: np.ndarray | None = None
        if vocabulary.num_scores < sizes.vocab_size:
            ids = vocabulary.output_ids or range(vocabulary.num_scores)
            self._vocab_ids = np.array(ids, dtype=np.int32)
        # What drafts were drawn from, by the step's requests; made when somebody asks for it.
        self._probs_shape = (sizes.max_requests, config.max_draft_len, vocabulary.num_scores)
        self._probs: ops.DraftProbs | None = None

    @property
    def memory_bytes(self) -> int:
        probs = 0 if self._probs is None else self._probs.probs.nbytes
        return int(self.passes.memory_bytes) + probs

    def bind_cache(self, k_pages: Any, v_pages: Any) -> None:
        """The draft model's pages [layers, P, G, S, K]."""
        self.model.bind_cache(k_pages, v_pages)
        self.passes.bind_pages(page_size=k_pages.shape[3], num_pages=k_pages.shape[1])

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        pick = pick_of(options)
        if pick == "own" and self._top_k == 1:
            self._make_probs()
        self.passes.enter(slot, pick, adaptive=bool(options.get("adaptive", True)))

    def read_prompts(self, prompts: PromptInputs) -> None:
        plan = self.passes.plan_prompts(
            prompts.tokens, prompts.slot_ids, prompts.kv_len, prompts.cu_rows, prompts.page_table
        )
        if plan is not None:
            self._forward(plan)
            self.passes.take_prompts()

    def draft(self, inputs: DraftInputs, *, wants_survival: bool) -> None:
        passes, before = self.passes, self.num_passes
        passes.begin(
            inputs.layout,
            inputs.slots,
            inputs.slot_ids,
            inputs.max_drafts,
            inputs.page_table,
            inputs.laws if inputs.samples else None,
            wants_survival or self._min_confidence > 0 or inputs.pass_price > 0,
            inputs.pass_price,
        )
        while (plan := passes.plan()) is not None:
            passes.take(self._forward(plan))
        self.passes_made = self.num_passes - before

    def draft_probs(self, num_requests: int) -> ops.DraftProbs | None:
        if self._probs is None or not self.passes.draws:
            return None
        return self._probs.first(num_requests)

    def _forward(self, plan: Any) -> Any:
        self.num_passes += 1
        self.num_rows += plan.num_rows
        return self.model.forward(plan)

    def _make_probs(self) -> None:
        if self._probs is not None:
            return
        requests, drafts, _ = self._probs_shape
        columns = np.zeros((requests, drafts), dtype=np.int32)
        drawn = np.zeros(requests, dtype=np.uint8)
        probs = np.zeros(self._probs_shape, dtype=np.float32)
        self.passes.bind_probs(probs, columns, drawn)
        self._probs = ops.DraftProbs(
            probs, self._vocab_ids, None if self._vocab_ids is None else columns, drawn
        )
