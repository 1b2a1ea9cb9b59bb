"""What the models of an engine leave for K/V: the memory plan, before they are loaded and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.dtypes import normalize_dtype
from ..config.engine import KvCacheConfig, SchedulerConfig
from ..config.methods import DraftTargetDecodingConfig
from ..config.parse import SpeculativeConfig
from ..config.sources import method_of
from ..drafters import feature_bytes
from ..models.host_arrays import kv_dtype_name
from ..models.kv_storage import token_bytes
from .draft_device import free_bytes_apart
from .memory_plan import (
    CPU_POOL_LIMIT_BYTES,
    DraftPages,
    MemoryPlan,
    available_memory_bytes,
    plan_memory,
)
from .narrow import held_windows

if TYPE_CHECKING:
    from ..drafters.eagle3.shape import Eagle3Shape
    from ..models.place import Place
    from ..models.windows import AttentionSpan

__all__ = ["ModelMemory"]


@dataclass(frozen=True)
class ModelMemory:
    """Plans the pages of a model and of what drafts for it.

    dtype        the models', as LLM takes it
    place        the model's, draft_place its draft model's
    ranks        processes that the model is spread over
    """

    speculative: SpeculativeConfig | None
    kv_cache: KvCacheConfig
    dtype: str
    model_impl: str
    place: Place
    draft_place: Place
    ranks: int

    def plan(
        self,
        model: Any,
        stored: str,
        max_position: int,
        scheduler: SchedulerConfig,
        span: AttentionSpan,
        windows: Sequence[int],
        *,
        draft: Any = None,
        head: Eagle3Shape | None = None,
        reserved: int = 0,
        reserved_there: int = 0,
    ) -> MemoryPlan:
        """`model` and `draft`, if there is one, have num_layers, num_kv_heads and head_dim.

        stored    dtype of the target's pages
        span      what a row of the target sees
        windows   of its layers
        head      of EAGLE-3, which keeps K/V of its own
        reserved  bytes that something else will take; reserved_there: on the draft model's device,
                  if it has one of its own
        """
        config = self.speculative
        on_device = self.place.free_bytes()
        on_host = on_device is None
        free = available_memory_bytes() if on_device is None else on_device
        return plan_memory(
            bytes_per_token=token_bytes(model, stored),
            max_position=max_position,
            draft_len=config.max_draft_len if config is not None else 0,
            kv_cache=self.kv_cache,
            scheduler=scheduler,
            free_bytes=max(0, free - reserved),
            draft=self._draft_pages(model, draft, head, reserved_there),
            pool_limit_bytes=CPU_POOL_LIMIT_BYTES if on_host else None,
            span=span,
            narrow=held_windows(
                *(model, stored, span, windows),
                on_cpu=self.place.is_cpu,
                tokens_per_block=self.kv_cache.tokens_per_block,
                ranks=self.ranks,
                model_impl=self.model_impl,
            ),
            narrow_sinks=self.kv_cache.sink_token_length,
            host_free_bytes=available_memory_bytes(),
        )

    def _draft_pages(
        self, model: Any, draft: Any, head: Eagle3Shape | None, reserved: int
    ) -> DraftPages | None:
        config = method_of(self.speculative)
        if head is not None:
            stated = self.dtype if self.dtype != "auto" else getattr(model, "dtype", None)
            dtype = normalize_dtype("dtype", kv_dtype_name(model) or stated or "float32")
            width = 4 if self.place.is_cpu or dtype == "float32" else 2
            return DraftPages(token_bytes(head, dtype) + feature_bytes(head, width))
        if draft is None or not isinstance(config, DraftTargetDecodingConfig):
            return None
        dtype = kv_dtype_name(draft) or (
            config.dtype if config.dtype != "auto" else draft.dtype or "float32"
        )
        dtype = normalize_dtype("draft model's dtype", dtype)
        free = free_bytes_apart(self.draft_place, self.place, reserved)
        return DraftPages(token_bytes(draft, dtype), config.max_kv_tokens, free)
