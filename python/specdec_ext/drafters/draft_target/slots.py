"""Draft-target decoding in a step: a second model drafts from the slots, beside the target.

The draft model has pages of its own with the ids of the target's, so a request's page table names
both, and whoever shares a page of the target shares the draft model's. A step's first pass reads
what the draft model has not read of a text, the golden token last; each further pass reads what
the one before chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ... import ops
from ...errors import ConfigError
from ..slot_drafter import DraftInputs, PromptInputs
from .draft_sizes import DraftSizes, TextReads, rows_read
from .host_passes import HostPasses

if TYPE_CHECKING:
    from ...config.methods import DraftTargetDecodingConfig
    from ...models import StepModel
    from ...models.place import Place
    from ..vocabulary import VocabularyMap
    from .device_apart import OwnDevice
    from .device_side import DeviceSide

__all__ = ["DraftTargetDrafter"]


class DraftTargetDrafter:
    """A SlotDrafter around a second StepModel; see bind_cache().

    place         of the draft model
    own_device    place is not the target's; None: it is
    pages         K and V of the draft model, [layers, P, G, S, K]; None: not bound yet. Where there
                  are fewer than the target has, a request that holds a page without a counterpart
                  is not drafted for
    wants_survival  estimates are wanted with the drafts though no request samples: passes give
                  scores, which say how sure the model is, not ids

    Raises ConfigError where the draft model cannot run on a device.
    """

    name = "draft_target"
    needs_hidden = False
    drafts_one_by_one = True
    wants_survival = False

    def __init__(
        self,
        config: DraftTargetDecodingConfig,
        model: StepModel,
        vocabulary: VocabularyMap,
        place: Place,
        sizes: DraftSizes,
        own_device: OwnDevice | None = None,
    ) -> None:
        if not place.is_cpu and model.impl != "native":
            raise ConfigError(
                f"DraftTargetDecodingConfig.model = {config.model!r}: on {place.name} this "
                "draft model runs in the transformers adapter, which takes its steps from the "
                "host; use a draft model of a native family, or device='cpu'"
            )
        self.config, self.model, self.own_device = config, model, own_device
        self.reads_every_step = not place.is_cpu
        self._place, self._overlap = place, vocabulary.overlap
        self._num_scores = vocabulary.num_scores
        self.side: HostPasses | DeviceSide
        if place.is_cpu:
            self.side = HostPasses(config, model, vocabulary, sizes)
        else:
            self.side = _on_device(config, model, vocabulary, place, sizes, own_device)
        self.pages: tuple[Any, Any] | None = None

    @property
    def passes_made(self) -> int:
        """On the CPU: by the last draft()."""
        return getattr(self.side, "passes_made", 0)

    @property
    def pages_of(self) -> Any:
        """See SlotDrafter."""
        return self.model

    @staticmethod
    def reads(config: DraftTargetDecodingConfig) -> int:
        """Rows of each request in a pass, at most, where every step reads what is new."""
        return rows_read(config)

    def bind_cache(self, k_pages: Any, v_pages: Any) -> None:
        """Pages of the draft model, [layers, P, G, S, K]."""
        self.side.bind_cache(k_pages, v_pages)
        self.pages = (k_pages, v_pages)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter. What its slot's prompt begins with is known when it is read."""
        self.side.enter(slot, options)

    def read_prompts(self, prompts: PromptInputs) -> None:
        """See SlotDrafter."""
        self.side.read_prompts(prompts)

    def draft(self, inputs: DraftInputs) -> None:
        """See SlotDrafter."""
        self.side.draft(inputs, wants_survival=self.wants_survival)

    def draft_probs(self, num_requests: int) -> ops.DraftProbs | None:
        """See SlotDrafter."""
        return self.side.draft_probs(num_requests)

    def stats(self) -> Mapping[str, Any]:
        """See SlotDrafter."""
        held = 0 if self.pages is None else sum(map(_num_bytes, self.pages))
        return {
            "memory_bytes": held + self.side.memory_bytes,
            "device": self._place.name,
            "model": str(self.model.info.path),
            "num_forward_passes": self.side.num_passes,
            "rows": self.side.num_rows,
            "draft_tokens": self._num_scores,
            "vocab_overlap": self._overlap,
        }


def _num_bytes(pages: Any) -> int:
    """Bytes of torch's tensors, or of the core's LazyZeros."""
    return int(pages.num_bytes if hasattr(pages, "num_bytes") else pages.nbytes)


def _on_device(
    config: DraftTargetDecodingConfig,
    model: StepModel,
    vocabulary: VocabularyMap,
    place: Place,
    sizes: DraftSizes,
    own_device: OwnDevice | None,
) -> DeviceSide:
    from .device_forward import DraftForward
    from .device_passes import DevicePasses
    from .device_trees import DeviceTrees

    def forward(rows: int, scores: int) -> DraftForward:
        return DraftForward(
            model, place, max_rows=rows, max_requests=sizes.max_requests, max_scores=scores
        )

    make = DevicePasses if config.top_k == 1 else DeviceTrees
    reads = TextReads(model.max_position, rows_read(config))
    return make(config, vocabulary, place, sizes, reads, forward, own_device)
