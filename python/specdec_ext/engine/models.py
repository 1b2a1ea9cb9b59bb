"""The models of an engine and the one memory plan that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.engine import KvCacheConfig, LookaheadDecodingConfig, SchedulerConfig, normalize_dtype
from ..config.methods import DrafterConfig, DraftTargetDecodingConfig, UserDrafterConfig
from ..config.parse import SpeculativeConfig
from ..config.suffix import SuffixDecodingConfig
from ..drafters import DraftTargetDrafter, SlotDrafter, make_drafter
from ..errors import ConfigError
from ..models.host_arrays import kv_dtype_name
from .memory_plan import (
    CPU_POOL_LIMIT_BYTES,
    DraftPages,
    MemoryPlan,
    available_memory_bytes,
    plan_memory,
)

if TYPE_CHECKING:
    from ..drafters.vocabulary import VocabularyMap
    from ..models.base import StepModel
    from ..models.place import Place

__all__ = ["LoadedModels", "ModelLoader", "drafting_arguments"]

# Fields of NGramDecodingConfig that the executor takes by their names.
_NGRAM = (
    "max_draft_len", "max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool",
)  # fmt: skip


def drafting_arguments(config: SpeculativeConfig | None) -> dict[str, Any]:
    """The executor's keywords for how drafts are made."""
    how: dict[str, Any] = {"method": "none"}
    if isinstance(config, LookaheadDecodingConfig):
        # (1,1,0) is plain decoding and must cost no more.
        if not config.is_plain:
            how = {"method": "lookahead", "lookahead": config.triple}
    elif isinstance(config, DrafterConfig):
        how = {
            "method": "proposed",
            "proposed_max_draft_len": config.max_draft_len,
            "proposed_max_path": config.longest_path_len,
            "proposed_by_host": isinstance(config, UserDrafterConfig),
        }
    elif isinstance(config, SuffixDecodingConfig):
        how = {"method": "suffix", "suffix": dict(config.lookup)}
    elif config is not None:
        how = {"method": "ngram", "ngram": {name: getattr(config, name) for name in _NGRAM}}
    if config is not None:
        how["draft_len_schedule"] = config.draft_len_steps
    return how


@dataclass(frozen=True)
class LoadedModels:
    """What was loaded.

    draft_model  the second model of draft-target decoding
    drafter      of slots; a user's is asked by the engine
    """

    model: StepModel
    draft_model: StepModel | None
    drafter: SlotDrafter | None
    memory: MemoryPlan


class ModelLoader:
    """The arguments are EngineBuilder's. Raises ConfigError, ModelError.

    vocabulary  relates a target's and a draft model's ids
    """

    def __init__(
        self,
        path: Path,
        *,
        speculative_config: SpeculativeConfig | None,
        kv_cache_config: KvCacheConfig,
        scheduler_config: SchedulerConfig,
        dtype: str,
        model_impl: str,
        allow_pickle: bool,
        place: Place,
        numerics: str,
        quantization: str | None,
        loader: Callable[..., StepModel] | None,
        vocabulary: Callable[[StepModel, StepModel], VocabularyMap],
    ) -> None:
        self._path = path
        self._speculative = speculative_config
        self._kv_cache = kv_cache_config
        self._scheduler = scheduler_config
        self._dtype, self._model_impl = dtype, model_impl
        self._allow_pickle = allow_pickle
        self._place = place
        self._numerics = numerics
        self._quantization = quantization
        self._loader = loader
        self._vocabulary = vocabulary

    def load(self) -> LoadedModels:
        """Load the weights and plan the memory.

        The plan comes first: the model's buffers are sized by its rows, and what cannot fit is
        refused before gigabytes are read. It is made again with what the model really has.
        """
        from ..models import load_model as default_loader
        from ..models.config_reader import read_config
        from ..models.load import native_weight_bytes
        from ..models.rope import max_position

        load_model = self._loader or default_loader
        config = read_config(self._path)
        spec = self._speculative
        draft = None
        if isinstance(spec, DraftTargetDecodingConfig):
            draft = read_config(str(spec.model))
        kv_dtype = self._dtype if self._dtype != "auto" else (config.dtype or "float32")
        scheduler = self._scheduler
        reserved = 0
        if self._place.on_cuda:
            size = 4 if normalize_dtype("dtype", kv_dtype) == "float32" else 2
            reserved = native_weight_bytes(config, size)
            reserved += native_weight_bytes(draft, size) if draft is not None else 0
        first = self._plan_memory(
            config, kv_dtype, max_position(config.hf), scheduler, draft, reserved
        )
        model = load_model(
            self._path,
            dtype=self._dtype,
            model_impl=self._model_impl,
            max_rows=first.max_num_tokens,
            max_seq_len=first.max_seq_len,
            allow_pickle=self._allow_pickle,
            place=self._place,
            numerics=self._numerics,
            quantization=self._quantization,
        )
        draft_model: StepModel | None = None
        if isinstance(spec, DraftTargetDecodingConfig):
            draft_model = load_model(
                str(spec.model),
                dtype=spec.dtype,
                model_impl=spec.model_impl,
                max_rows=self._draft_rows(first),
                max_seq_len=first.max_seq_len,
                allow_pickle=self._allow_pickle,
                draft=True,
                place=self._place,
            )
        graphs = 0
        drafter: SlotDrafter | None = None
        if draft_model is not None:
            assert isinstance(spec, DraftTargetDecodingConfig)
            drafter = self._draft_target(spec, model, draft_model, first)
        elif isinstance(spec, DrafterConfig) and not isinstance(spec, UserDrafterConfig):
            # Before the pages: its weights may share a device with them.
            drafter = make_drafter(
                spec, model, max_requests=first.max_batch_size, allow_pickle=self._allow_pickle
            )
        taken = sum(getattr(m, "scratch_bytes", 0) for m in (model, draft_model))
        scratch = getattr(drafter, "scratch_bytes", None)
        taken += scratch(first.max_batch_size) if scratch is not None else 0
        if not self._place.is_cpu:
            from .overlap.build import device_bytes, graph_bytes

            spec = getattr(drafter, "config", spec)
            drafting = drafting_arguments(spec)
            hidden = 0
            if drafter is not None and drafter.needs_hidden:
                hidden = model.hidden_size * model.kv_dtype.itemsize
            taken += device_bytes(first, self._scheduler, drafting, model.vocab_size, hidden)
            graphs = graph_bytes(
                model,
                first,
                self._scheduler,
                self._place,
                drafting,
                drafter,
                synthetic_rates=() if spec is None else spec.synthetic_rates,
            )
        memory = self._plan_memory(
            model,
            normalize_dtype("model.kv_dtype", kv_dtype_name(model)),
            model.max_position,
            dataclasses.replace(
                self._scheduler,
                max_num_tokens=first.max_num_tokens,
                max_seq_len=min(first.max_seq_len, model.max_position),
            ),
            draft_model,
            taken + graphs,
        )
        memory = dataclasses.replace(memory, graph_bytes=graphs)
        return LoadedModels(model, draft_model, drafter, memory)

    def _draft_rows(self, plan: MemoryPlan) -> int:
        """Rows of one pass of a draft model."""
        assert isinstance(self._speculative, DraftTargetDecodingConfig)
        reads = DraftTargetDrafter.reads(self._speculative)
        return max(plan.max_num_tokens, reads * plan.max_batch_size)

    def _draft_target(
        self, spec: DraftTargetDecodingConfig, model: StepModel, draft: StepModel, plan: MemoryPlan
    ) -> SlotDrafter:
        if not self._place.is_cpu and draft.impl != "native":
            raise ConfigError(
                f"DraftTargetDecodingConfig.model = {str(spec.model)!r}: on {self._place.name} "
                "this draft model runs in the transformers adapter, which takes its steps from "
                "the host; use a draft model of a native family, or device='cpu'"
            )
        return DraftTargetDrafter(
            spec,
            draft,
            self._vocabulary(model, draft),
            self._place,
            vocab_size=model.vocab_size,
            max_requests=plan.max_batch_size,
            max_rows=self._draft_rows(plan),
        )

    def _plan_memory(
        self,
        model: Any,
        kv_dtype: str,
        max_position: int,
        scheduler: SchedulerConfig,
        draft: Any = None,
        reserved: int = 0,
    ) -> MemoryPlan:
        """`model` and `draft`, if there is one, have num_layers, num_kv_heads and head_dim.

        reserved  bytes that something else will take
        """
        wanted = self._kv_cache.dtype
        if wanted not in ("auto", kv_dtype):
            raise ConfigError(
                f"KvCacheConfig.dtype = {wanted!r}: this model keeps K and V in {kv_dtype}; use "
                f"'auto' or load the model with dtype={wanted!r}"
            )
        config = self._speculative
        on_device = self._place.free_bytes()
        on_host = on_device is None
        free = available_memory_bytes() if on_device is None else on_device
        return plan_memory(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            kv_bytes=4 if kv_dtype == "float32" else 2,
            max_position=max_position,
            draft_len=config.max_draft_len if config is not None else 0,
            kv_cache=self._kv_cache,
            scheduler=scheduler,
            free_bytes=max(0, free - reserved),
            draft=self._draft_pages(draft),
            pool_limit_bytes=CPU_POOL_LIMIT_BYTES if on_host else None,
        )

    def _draft_pages(self, draft: Any) -> DraftPages | None:
        config = self._speculative
        if draft is None or not isinstance(config, DraftTargetDecodingConfig):
            return None
        dtype = kv_dtype_name(draft) or (
            config.dtype if config.dtype != "auto" else draft.dtype or "float32"
        )
        element = 4 if normalize_dtype("draft model's dtype", dtype) == "float32" else 2
        per_token = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * element
        return DraftPages(per_token, config.max_kv_tokens)
