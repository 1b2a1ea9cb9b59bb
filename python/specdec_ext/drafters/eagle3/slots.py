"""EAGLE-3 in steps that the host runs: drafts from the slots, features after each commit.

The head's K/V lies in pages with the ids of the target's, and so do the features that the target's
states were fused to. So a shared prefix is shared by both, a text that was not drafted for is read
later, and nothing of a request has to be carried along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import _core, ops
from ...config.eagle3 import Eagle3DecodingConfig
from ...errors import UnsupportedConfigError
from ...models.host_arrays import kv_dtype_name
from ...models.place import Place
from ..draft_target.draft_sizes import DraftSizes
from ..draft_target.host_passes import HostPasses
from ..shipped import folder_of
from ..slot_drafter import DraftInputs, PromptInputs, SlotDrafter
from ..vocabulary import VocabularyMap
from .checkpoint import Eagle3Weights, taps_of
from .packed_head import pack_head
from .shape import Eagle3Shape

__all__ = ["Eagle3Drafter", "feature_bytes", "make_eagle3"]


def feature_bytes(shape: Eagle3Shape, itemsize: int = 4) -> int:
    """What one token takes besides its K/V; itemsize: of a number, float32 where the host runs."""
    return itemsize * shape.hidden_size


def make_eagle3(
    config: Eagle3DecodingConfig, weights: Eagle3Weights, model: Any, place: Place, **sizes: int
) -> SlotDrafter:
    """An Eagle3Drafter, or the one of a device; sizes: max_requests, max_rows, window."""
    if place.is_cpu:
        return Eagle3Drafter(config, weights, model, **sizes)
    from .device_slots import Eagle3OnDevice

    return Eagle3OnDevice(config, weights, model, **sizes)


class _Head:
    """What HostPasses runs: the head as a model whose rows have sources."""

    def __init__(self, core: Any, num_scores: int, max_position: int) -> None:
        self.core, self.max_position = core, max_position
        self._num_scores = num_scores
        self.passes: Any = None  # whose plans are run

    def forward(self, plan: Any) -> Any:
        scores = None
        if plan.num_logit_rows:
            scores = np.empty((plan.num_logit_rows, self._num_scores), dtype=np.float32)
        self.core.forward(plan, self.passes.sources(plan), scores)
        return scores


class Eagle3Drafter:
    """See SlotDrafter; the trees hold what drafters of draft models put into theirs.

    weights       of the head
    model         the target, on the native decoder of the CPU
    max_requests  slots of the engine
    max_rows      of a step of the engine
    window        tokens that the target sees, whose pages go behind it; 0: all

    It has the attributes of a model with one layer of K/V, by which its pages are made. Raises
    ModelError where the head does not fit the target, UnsupportedConfigError where the target runs
    elsewhere.
    """

    name = "eagle3"
    needs_hidden = False
    drafts_one_by_one = True
    num_layers = 1

    def __init__(
        self,
        config: Eagle3DecodingConfig,
        weights: Eagle3Weights,
        model: Any,
        *,
        max_requests: int,
        max_rows: int,
        window: int = 0,
    ) -> None:
        if not hasattr(model, "set_taps") or getattr(model, "shard", None) is not None:
            raise UnsupportedConfigError(
                "Eagle3DecodingConfig: the head taps a decoder of one process, and this target "
                f"runs as {model.impl!r}; use tensor_parallel_size=1, or another method"
            )
        shape = weights.shape
        taps = taps_of(config, weights, model)
        self.config, self.shape = config, shape
        self.num_kv_heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        self.kv_dtype_name = kv_dtype_name(model)
        self._taps = model.set_taps(taps, max_rows)
        positions = min(shape.max_position, model.max_position)
        core = pack_head(weights, model, positions, window)
        self._core = core
        head: Any = _Head(core, shape.draft_vocab_size, positions)
        self.side = HostPasses(
            config,
            head,
            VocabularyMap(shape.draft_vocab_size, [], weights.token_ids.tolist()),
            DraftSizes(
                model.vocab_size, max_requests, max(max_rows, config.rows_of_pass * max_requests)
            ),
            takes_features=True,
        )
        head.passes = self.side.passes
        self._pages: tuple[Any, Any] | None = None
        self._features: Any = None

    @property
    def passes_made(self) -> int:
        """By the last draft()."""
        return self.side.passes_made

    @property
    def pages_of(self) -> Any:
        """See SlotDrafter."""
        return self

    def bind_cache(self, k_pages: Any, v_pages: Any) -> None:
        """Pages with the ids of the target's, [1, P, G, S, K]; those of the features are made."""
        _, pages, _, size, _ = k_pages.shape
        self._features = _core.LazyZeros((pages, size, self.shape.hidden_size), "float32")
        self._core.bind_cache(k_pages, v_pages, self._features)
        self.side.passes.bind_pages(page_size=size, num_pages=pages)
        self._pages = (k_pages, v_pages)

    @property
    def feature_pages(self) -> tuple[Any, ...]:
        """[P, S, hidden_size] float32, by the pages' numbers, once they are made."""
        return () if self._features is None else (self._features,)

    def release(self) -> None:
        """Give the memory of the features back, as KvPages.release()."""
        if self._features is not None:
            self._features.release()

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter."""
        self.side.enter(slot, options)

    def draft(self, inputs: DraftInputs) -> None:
        """See SlotDrafter."""
        self.side.draft(inputs, wants_survival=True)

    def draft_probs(self, num_requests: int) -> ops.DraftProbs | None:
        """See SlotDrafter."""
        return self.side.draft_probs(num_requests)

    def after_commit(
        self, plan: Any, layout: Any, slots: np.ndarray, prompts: PromptInputs | None
    ) -> None:
        """See SlotDrafter: keeps the features of what was accepted, and reads prompts."""
        count = 0 if prompts is None else len(prompts.slot_ids)
        self._core.keep(plan, count, layout, slots, self._taps)
        if prompts is not None:
            self.side.read_prompts(prompts)

    def stats(self) -> Mapping[str, Any]:
        """See SlotDrafter."""
        held = [*(self._pages or ()), *([] if self._features is None else [self._features])]
        return {
            "memory_bytes": sum(int(pages.num_bytes) for pages in held)
            + int(self._core.weight_bytes)
            + self.side.memory_bytes
            + self._taps.nbytes,
            "device": "cpu",
            "model": str(folder_of(self.config)),
            "num_forward_passes": self.side.num_passes,
            "rows": self.side.num_rows,
            "features": int(self._core.num_kept),
            "draft_tokens": self.shape.draft_vocab_size,
        }
