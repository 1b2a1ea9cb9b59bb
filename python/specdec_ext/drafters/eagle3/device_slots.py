"""EAGLE-3 on a device's stream: the passes of a draft model there, run by the head.

Features lie in pages with the ids of the target's, as K/V does: one half of each in the place of K,
the other in that of V. So whatever moves or copies K/V serves them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ... import ops
from ...config.eagle3 import Eagle3DecodingConfig
from ...errors import UnsupportedConfigError
from ...models.device_model import DeviceModel
from ...models.host_arrays import kv_dtype_name
from ..draft_target.device_passes import DevicePasses
from ..draft_target.device_trees import DeviceTrees
from ..draft_target.draft_sizes import DraftSizes, TextReads
from ..shipped import folder_of
from ..slot_drafter import DraftInputs, PromptInputs
from ..vocabulary import VocabularyMap
from .checkpoint import Eagle3Weights, taps_of
from .device_head import DeviceHead

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.device_step import DeviceStep

__all__ = ["Eagle3OnDevice"]


class Eagle3OnDevice:
    """See Eagle3Drafter and SlotDrafter.

    It has the attributes of a model with one layer of K/V, by which its pages are made. Raises
    ModelError where the head does not fit the target, UnsupportedConfigError where the target runs
    in the adapter or the head's size has no kernels.
    """

    name = "eagle3"
    needs_hidden = False
    drafts_one_by_one = True
    reads_every_step = True
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
        """See Eagle3Drafter."""
        if not isinstance(model, DeviceModel):
            raise UnsupportedConfigError(
                "Eagle3DecodingConfig: on a device the head taps the native decoder, and this "
                f"target runs as {model.impl!r}; use a target of a native family, or device='cpu'"
            )
        shape = self.shape = weights.shape
        taps = taps_of(config, weights, model)
        self.config = config
        self._place = model.place
        self.num_kv_heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        self.kv_dtype, self.kv_dtype_name = model.kv_dtype, kv_dtype_name(model)
        self._feature_heads = shape.feature_heads()
        self._taps = model.set_taps(taps, max_rows)
        # What a step adds to a text, its golden token and a path, and that token's own row, which
        # keep() has cleared.
        reads = TextReads(
            min(shape.max_position, model.max_position), config.max_draft_path_len + 2, first=1
        )

        def forward(rows: int, scores: int) -> DeviceHead:
            return DeviceHead(
                weights, model, max_rows=max(rows, max_rows), max_requests=max_requests,
                max_scores=scores, window=window,
            )  # fmt: skip

        make = DevicePasses if config.top_k == 1 else DeviceTrees
        self._side = make(
            config,
            VocabularyMap(shape.draft_vocab_size, [], weights.token_ids.tolist()),
            model.place,
            DraftSizes(model.vocab_size, max_requests, max(max_rows, reads.last * max_requests)),
            reads,
            forward,
        )
        assert isinstance(self._side.forward, DeviceHead)
        self._head = self._side.forward
        self._pages: tuple[Tensor, Tensor] | None = None
        self.feature_pages: tuple[Tensor, ...] = ()  # (first, second) halves, once they are made

    @property
    def pages_of(self) -> Any:
        """See SlotDrafter."""
        return self

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """Pages with the ids of the target's, [1, P, G, S, K]; those of the features are made."""
        _, pages, _, size, _ = k_pages.shape
        heads, head_dim = self._feature_heads
        first, second = (
            k_pages.new_zeros(1, pages, heads, size, head_dim, dtype=self.kv_dtype)
            for _ in range(2)
        )
        self._pages, self.feature_pages = (k_pages, v_pages), (first, second)
        self._side.bind_cache(k_pages, v_pages)
        self._head.bind_features(first, second)

    @property
    def moved_pages(self) -> tuple[Tensor, ...]:
        """See SlotDrafter."""
        return self.feature_pages

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter."""
        self._side.enter(slot, options)

    def after_forward(self, step: DeviceStep) -> None:
        """See SlotDrafter."""
        self._head.keep(step, self._taps)

    def read_prompts(self, prompts: PromptInputs) -> None:
        """See SlotDrafter."""
        self._side.read_prompts(prompts)

    def draft(self, inputs: DraftInputs) -> None:
        """See SlotDrafter."""
        self._side.draft(inputs, wants_survival=True)

    def draft_probs(self, num_requests: int) -> ops.DraftProbs | None:
        """See SlotDrafter."""
        return self._side.draft_probs(num_requests)

    def stats(self) -> Mapping[str, Any]:
        """See SlotDrafter."""
        held = [*(self._pages or ()), *self.feature_pages, self._taps]
        return {
            "memory_bytes": sum(t.nbytes for t in held) + self._side.memory_bytes,
            "device": self._place.name,
            "model": str(folder_of(self.config)),
            "num_forward_passes": self._side.num_passes,
            "rows": self._side.num_rows,
            "draft_tokens": self.shape.draft_vocab_size,
        }
