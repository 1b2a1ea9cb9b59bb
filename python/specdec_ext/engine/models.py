"""The models of an engine and the one memory plan that they share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.dtypes import normalize_dtype
from ..config.engine import KvCacheConfig, SchedulerConfig
from ..config.methods import (
    DrafterConfig,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    UserDrafterConfig,
)
from ..config.parse import SpeculativeConfig
from ..config.sources import method_of
from ..drafters import (
    DraftSizes,
    DraftTargetDrafter,
    Eagle3Weights,
    LateDrafter,
    SlotDrafter,
    check_eagle3,
    feature_bytes,
    find_shared_tokens,
    make_drafter,
    make_eagle3,
    map_vocabulary,
    read_eagle3,
)
from ..errors import UnsupportedConfigError
from ..models.host_arrays import kv_dtype_name
from ..models.kv_storage import storage_dtype, stored_name, token_bytes, wanted_type
from ..models.place import draft_place
from ..models.shard import kv_heads_of_ranks
from ..models.windows import (
    AttentionSpan,
    config_windows,
    limited_windows,
    span_of,
)
from .draft_device import free_bytes_apart
from .drafting_arguments import drafting_arguments
from .memory_plan import (
    CPU_POOL_LIMIT_BYTES,
    DraftPages,
    MemoryPlan,
    available_memory_bytes,
    plan_memory,
)
from .narrow import held_windows

if TYPE_CHECKING:
    from ..drafters.shared_tokens import SharedTokens
    from ..models.base import StepModel
    from ..models.config_reader import ModelConfig
    from ..models.place import Place
    from ..parallel.team import Team

__all__ = ["LoadedModels", "ModelLoader", "ModelOptions"]


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


@dataclass(frozen=True)
class ModelOptions:
    """LLM's arguments that decide which models are loaded and how, checked.

    device  where all of them run
    loader  in the place of models.load_model, with its arguments
    team    the ranks that the model, but no drafter, is spread over; None: this process alone
    """

    path: Path
    speculative_config: SpeculativeConfig | None
    kv_cache_config: KvCacheConfig
    scheduler_config: SchedulerConfig
    dtype: str
    model_impl: str
    allow_pickle: bool
    device: str = "cpu"
    numerics: str = "auto"
    quantization: str | None = None
    loader: Callable[..., StepModel] | None = None
    team: Team | None = None


class ModelLoader:
    """Raises ConfigError, ModelError.

    place       options.device, resolved; of a draft model without a device of its own, too
    tokenizers  the target's, and that of a draft model in a folder; None: it has none
    late        a drafter that is known to fit is loaded when it is asked first
    """

    def __init__(
        self,
        options: ModelOptions,
        place: Place,
        tokenizers: Callable[[Path], tuple[Any, Any]],
        *,
        late: bool = False,
    ) -> None:
        self._options, self._place, self._late = options, place, late
        self._speculative = options.speculative_config
        self._kv_cache, self._scheduler = options.kv_cache_config, options.scheduler_config
        self._tokenizers = tokenizers
        self._head: Eagle3Weights | None = None  # of EAGLE-3
        spec = self._drafter
        wanted = spec.device if isinstance(spec, DraftTargetDecodingConfig) else None
        self._draft_place = place if wanted is None else draft_place(wanted, (options.device,))

    def load(self) -> LoadedModels:
        """Load the weights and plan the memory.

        The plan comes first: the model's buffers are sized by its rows, and what cannot fit is
        refused before gigabytes are read. It is made again with what the model really has.
        """
        from ..models import load_model as default_loader
        from ..models.config_reader import read_config
        from ..models.default_drafter import draft_model_folder
        from ..models.load import native_weight_bytes
        from ..models.rope import max_position

        options = self._options
        load_model = options.loader or default_loader
        config = read_config(options.path)
        spec = self._drafter
        self._refuse_beside_operations()
        draft: Any = None
        draft_path = Path()
        shared: SharedTokens | None = None
        if isinstance(spec, DraftTargetDecodingConfig):
            draft_path = draft_model_folder(str(spec.model), options.path)
            draft = read_config(draft_path, role="draft model")
            if spec.allow_vocab_mapping:
                shared = find_shared_tokens(config, draft, *self._tokenizers(draft.path))
        if isinstance(spec, Eagle3DecodingConfig):
            self._head = self._read_head(spec, config)
        kv_dtype = options.dtype if options.dtype != "auto" else (config.dtype or "float32")
        scheduler = self._scheduler
        reserved, ranks_of_model = 0, 1 if options.team is None else options.team.size
        of_draft = 0  # bytes of the draft model's weights
        if self._place.on_cuda:
            size = 4 if normalize_dtype("dtype", kv_dtype) == "float32" else 2
            reserved = native_weight_bytes(config, size, ranks_of_model)
            if draft is not None:
                of_draft = native_weight_bytes(draft, size)
                reserved += 0 if self._apart else of_draft
        cache = self._kv_cache
        windows = limited_windows(
            config_windows(config), cache.attention_windows, cache.sink_token_length,
            str(config.path),
        )  # fmt: skip
        span = AttentionSpan.of(windows, cache.sink_token_length)
        stored = storage_dtype(
            wanted_type(self._kv_cache.dtype, config),
            normalize_dtype("dtype", kv_dtype),
            self._place,
        )
        # Each device of several ranks holds its own heads; rank 0 has no fewer than the others.
        on_this_rank = config
        if not self._place.is_cpu:
            heads = kv_heads_of_ranks(config.num_kv_heads, ranks_of_model)[0]
            on_this_rank = dataclasses.replace(config, num_kv_heads=heads)
        first = self._plan_memory(
            on_this_rank, stored, max_position(config.hf), scheduler, span, windows, draft,
            reserved, of_draft,
        )  # fmt: skip
        ranks: dict[str, Any] = {} if options.team is None else {"team": options.team}
        if cache.attention_windows or cache.sink_token_length:
            ranks |= {
                "max_attention_window": cache.attention_windows,
                "sink_token_length": cache.sink_token_length,
            }
        model = load_model(
            options.path,
            dtype=options.dtype,
            model_impl=options.model_impl,
            max_rows=first.max_num_tokens,
            max_seq_len=first.max_seq_len,
            allow_pickle=options.allow_pickle,
            place=self._place,
            numerics=options.numerics,
            quantization=options.quantization,
            **ranks,
            kv_cache_dtype=self._kv_cache.dtype,
        )
        draft_model: StepModel | None = None
        if isinstance(spec, DraftTargetDecodingConfig):
            draft_model = load_model(
                draft_path,
                dtype=spec.dtype,
                model_impl=spec.model_impl,
                max_rows=self._draft_rows(first),
                max_seq_len=first.max_seq_len,
                allow_pickle=options.allow_pickle,
                draft=True,
                place=self._draft_place,
                head_ids=None if shared is None else shared.draft_ids,
                # Its pages go when the target's do.
                max_attention_window=(span.window,) if span.window else (),
                sink_token_length=span.sink_tokens,
            )
        graphs = 0
        drafter: SlotDrafter | None = None
        if self._head is not None:
            assert isinstance(spec, Eagle3DecodingConfig)
            drafter = make_eagle3(
                spec,
                self._head,
                model,
                self._place,
                max_requests=first.max_batch_size,
                max_rows=first.max_num_tokens,
                window=span.window,
            )
        elif draft_model is not None:
            assert isinstance(spec, DraftTargetDecodingConfig)
            own_device = None
            if self._apart:
                from .overlap.build import make_own_device

                own_device = make_own_device(self._draft_place, self._place)
            tokenizers = self._tokenizers(draft_model.info.path)
            drafter = DraftTargetDrafter(
                spec,
                draft_model,
                map_vocabulary(model, draft_model, *tokenizers, shared),
                self._draft_place,
                DraftSizes(model.vocab_size, first.max_batch_size, self._draft_rows(first)),
                own_device,
            )
        elif isinstance(spec, DrafterConfig) and not isinstance(spec, UserDrafterConfig):
            # Before the pages: its weights may share a device with them.
            make = functools.partial(
                make_drafter,
                spec, model, max_requests=first.max_batch_size, allow_pickle=options.allow_pickle,
            )  # fmt: skip
            drafter = LateDrafter(spec.method, make) if self._late else make()
        scratch_of = [getattr(m, "scratch_bytes", 0) for m in (model, draft_model)]
        taken_there = scratch_of.pop() if self._apart else 0  # on the draft model's device
        taken = sum(scratch_of)
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
            graphs, graphs_there = graph_bytes(
                model,
                first,
                self._scheduler,
                self._place,
                drafting,
                drafter,
                synthetic_rates=() if spec is None else spec.synthetic_rates,
            )
            taken_there += graphs_there
        memory = self._plan_memory(
            model,
            str(stored_name(model)),
            model.max_position,
            dataclasses.replace(
                self._scheduler,
                max_num_tokens=first.max_num_tokens,
                max_seq_len=min(first.max_seq_len, model.max_position),
            ),
            span_of(model),
            getattr(model, "layer_windows", ()),
            draft_model,
            taken + graphs,
            taken_there,
        )
        memory = dataclasses.replace(memory, graph_bytes=graphs)
        return LoadedModels(model, draft_model, drafter, memory)

    @property
    def _drafter(self) -> SpeculativeConfig | None:
        """The configuration without what drafts beside its network."""
        method: SpeculativeConfig | None = method_of(self._speculative)
        return method

    @property
    def _apart(self) -> bool:
        """The draft model has a device of its own."""
        return self._draft_place != self._place

    def _refuse_beside_operations(self) -> None:
        """Where steps are enqueued on a stream, the host does not see a network's drafts."""
        composite = self._speculative is not self._drafter
        if composite and isinstance(self._drafter, DrafterConfig) and not self._place.is_cpu:
            raise UnsupportedConfigError(
                f"speculative_config: suffix decoding beside {self._drafter.words} on "
                f"{self._place.name}: the host merges their drafts, a device's step is enqueued "
                "before they are made; use one of the two, or device='cpu'"
            )

    def _read_head(self, spec: Eagle3DecodingConfig, target: ModelConfig) -> Eagle3Weights:
        """An EAGLE-3 head that fits the target. Raises ModelError, UnsupportedConfigError."""
        if self._options.team is not None and self._place.is_cpu:
            raise UnsupportedConfigError(
                f"Eagle3DecodingConfig.model = {str(spec.model)!r}: the head taps a decoder of one "
                "process, and this target runs on several ranks of the CPU; use "
                "tensor_parallel_size=1, or another method"
            )
        if not self._place.is_cpu and self._options.model_impl == "transformers":
            raise UnsupportedConfigError(
                f"Eagle3DecodingConfig.model = {str(spec.model)!r}: on {self._place.name} the head "
                "taps the native decoder; use model_impl='native', device='cpu' or another method"
            )
        weights = read_eagle3(str(spec.model), allow_pickle=self._options.allow_pickle)
        check_eagle3(spec, weights, target)
        if not self._place.is_cpu:
            weights.shape.feature_heads()
        return weights

    def _draft_rows(self, plan: MemoryPlan) -> int:
        """Rows of one pass of a draft model."""
        spec = self._drafter
        assert isinstance(spec, DraftTargetDecodingConfig)
        reads = DraftTargetDrafter.reads(spec)
        return max(plan.max_num_tokens, reads * plan.max_batch_size)

    def _plan_memory(
        self,
        model: Any,
        stored: str,
        max_position: int,
        scheduler: SchedulerConfig,
        span: AttentionSpan,
        windows: Sequence[int],
        draft: Any = None,
        reserved: int = 0,
        reserved_there: int = 0,
    ) -> MemoryPlan:
        """`model` and `draft`, if there is one, have num_layers, num_kv_heads and head_dim.

        stored    dtype of the target's pages
        span      what a row of the target sees
        windows   of its layers
        reserved  bytes that something else will take; reserved_there: on the draft model's device,
                  if it has one of its own
        """
        config = self._speculative
        on_device = self._place.free_bytes()
        on_host = on_device is None
        free = available_memory_bytes() if on_device is None else on_device
        return plan_memory(
            bytes_per_token=token_bytes(model, stored),
            max_position=max_position,
            draft_len=config.max_draft_len if config is not None else 0,
            kv_cache=self._kv_cache,
            scheduler=scheduler,
            free_bytes=max(0, free - reserved),
            draft=self._draft_pages(model, draft, reserved_there),
            pool_limit_bytes=CPU_POOL_LIMIT_BYTES if on_host else None,
            span=span,
            narrow=held_windows(
                *(model, stored, span, windows),
                on_cpu=self._place.is_cpu,
                tokens_per_block=self._kv_cache.tokens_per_block,
                ranks=1 if self._options.team is None else self._options.team.size,
                model_impl=self._options.model_impl,
            ),
            narrow_sinks=self._kv_cache.sink_token_length,
            host_free_bytes=available_memory_bytes(),
        )

    def _draft_pages(self, model: Any, draft: Any, reserved: int) -> DraftPages | None:
        config = self._drafter
        if self._head is not None:
            shape = self._head.shape
            stated = (
                self._options.dtype
                if self._options.dtype != "auto"
                else getattr(model, "dtype", None)
            )
            dtype = normalize_dtype("dtype", kv_dtype_name(model) or stated or "float32")
            width = 4 if self._place.is_cpu or dtype == "float32" else 2
            return DraftPages(token_bytes(shape, dtype) + feature_bytes(shape, width))
        if draft is None or not isinstance(config, DraftTargetDecodingConfig):
            return None
        dtype = kv_dtype_name(draft) or (
            config.dtype if config.dtype != "auto" else draft.dtype or "float32"
        )
        dtype = normalize_dtype("draft model's dtype", dtype)
        free = free_bytes_apart(self._draft_place, self._place, reserved)
        return DraftPages(token_bytes(draft, dtype), config.max_kv_tokens, free)
