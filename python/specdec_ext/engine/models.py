"""The models of an engine: which are loaded, in which order, and the memory plan they share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.dtypes import normalize_dtype
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
    draft_folder_of,
    find_shared_tokens,
    folder_of,
    make_drafter,
    make_eagle3,
    map_vocabulary,
    read_eagle3,
)
from ..errors import UnsupportedConfigError
from ..models.kv_storage import storage_dtype, stored_name, wanted_type
from ..models.place import draft_place
from ..models.shard import kv_heads_of_ranks
from ..models.windows import (
    AttentionSpan,
    config_windows,
    limited_windows,
    span_of,
)
from .drafting_arguments import drafting_arguments
from .memory_plan import MemoryPlan
from .model_memory import ModelMemory
from .model_options import ModelOptions

if TYPE_CHECKING:
    from ..drafters.eagle3.shape import Eagle3Shape
    from ..drafters.shared_tokens import SharedTokens
    from ..models.base import StepModel
    from ..models.config_reader import ModelConfig
    from ..models.place import Place

__all__ = ["LoadedModels", "ModelLoader"]


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
class _Found:
    """What the configurations say, before any weight is read.

    model   the target's; held: with the K/V heads that a device of this rank holds
    stored  dtype of its pages
    draft   the draft model's, and its folder; None: there is none
    shared  tokens of both where the vocabularies differ
    head    of EAGLE-3
    """

    model: ModelConfig
    held: Any
    kv_dtype: str
    stored: str
    windows: Sequence[int]
    span: AttentionSpan
    draft: ModelConfig | None = None
    draft_path: Path = Path()
    shared: SharedTokens | None = None
    head: Eagle3Weights | None = None


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
        spec = self._drafter
        wanted = spec.device if isinstance(spec, DraftTargetDecodingConfig) else None
        self._draft_place = place if wanted is None else draft_place(wanted, (options.device,))
        self._ranks = 1 if options.team is None else options.team.size
        self._memory = ModelMemory(
            self._speculative, self._kv_cache, options.dtype, options.model_impl,
            place, self._draft_place, self._ranks,
        )  # fmt: skip

    def load(self) -> LoadedModels:
        """Load the weights and plan the memory.

        The plan comes first: the model's buffers are sized by its rows, and what cannot fit is
        refused before gigabytes are read. It is made again with what the model really has.
        """
        found = self._find()
        first = self._first_plan(found)
        model = self._load_model(first)
        draft_model = self._load_draft_model(found, first)
        drafter = self._make_drafter(found, first, model, draft_model)
        memory = self._last_plan(found, first, model, draft_model, drafter)
        return LoadedModels(model, draft_model, drafter, memory)

    def _find(self) -> _Found:
        """Read the configurations, and refuse what cannot go together."""
        from ..models.config_reader import read_config

        options, spec, cache = self._options, self._drafter, self._kv_cache
        config = read_config(options.path)
        self._refuse_beside_operations()
        draft, draft_path, shared, head = None, Path(), None, None
        if isinstance(spec, DraftTargetDecodingConfig):
            draft_path = draft_folder_of(spec, options.path)
            draft = read_config(draft_path, role="draft model")
            if spec.allow_vocab_mapping:
                shared = find_shared_tokens(config, draft, *self._tokenizers(draft.path))
        if isinstance(spec, Eagle3DecodingConfig):
            head = self._read_head(spec, config)
        stated = options.dtype if options.dtype != "auto" else (config.dtype or "float32")
        kv_dtype = normalize_dtype("dtype", stated)
        windows = limited_windows(
            config_windows(config), cache.attention_windows, cache.sink_token_length,
            str(config.path),
        )  # fmt: skip
        # Each device of several ranks holds its own heads; rank 0 has no fewer than the others.
        held = config
        if not self._place.is_cpu:
            heads = kv_heads_of_ranks(config.num_kv_heads, self._ranks)[0]
            held = dataclasses.replace(config, num_kv_heads=heads)
        return _Found(
            config, held, kv_dtype,
            storage_dtype(wanted_type(cache.dtype, config), kv_dtype, self._place),
            windows, AttentionSpan.of(windows, cache.sink_token_length),
            draft, draft_path, shared, head,
        )  # fmt: skip

    def _first_plan(self, found: _Found) -> MemoryPlan:
        """What the weights will leave."""
        from ..models.load import native_weight_bytes
        from ..models.rope import max_position

        reserved = of_draft = 0
        if self._place.on_cuda:
            size = 4 if found.kv_dtype == "float32" else 2
            reserved = native_weight_bytes(found.model, size, self._ranks)
            if found.draft is not None:
                of_draft = native_weight_bytes(found.draft, size)
                reserved += 0 if self._apart else of_draft
        return self._memory.plan(
            found.held, found.stored, max_position(found.model.hf), self._scheduler, found.span,
            found.windows,
            draft=found.draft, head=_shape_of(found.head), reserved=reserved,
            reserved_there=of_draft,
        )  # fmt: skip

    def _load_model(self, first: MemoryPlan) -> StepModel:
        options, cache = self._options, self._kv_cache
        more: dict[str, Any] = {} if options.team is None else {"team": options.team}
        if cache.attention_windows or cache.sink_token_length:
            more |= {
                "max_attention_window": cache.attention_windows,
                "sink_token_length": cache.sink_token_length,
            }
        return self._load_weights(
            options.path,
            first,
            dtype=options.dtype,
            model_impl=options.model_impl,
            max_rows=first.max_num_tokens,
            place=self._place,
            numerics=options.numerics,
            quantization=options.quantization,
            kv_cache_dtype=cache.dtype,
            **more,
        )

    def _load_draft_model(self, found: _Found, first: MemoryPlan) -> StepModel | None:
        spec = self._drafter
        if not isinstance(spec, DraftTargetDecodingConfig):
            return None
        span = found.span
        return self._load_weights(
            found.draft_path,
            first,
            dtype=spec.dtype,
            model_impl=spec.model_impl,
            max_rows=self._draft_rows(first),
            draft=True,
            place=self._draft_place,
            head_ids=None if found.shared is None else found.shared.draft_ids,
            # Its pages go when the target's do.
            max_attention_window=(span.window,) if span.window else (),
            sink_token_length=span.sink_tokens,
        )

    def _load_weights(self, path: Path, first: MemoryPlan, **arguments: Any) -> StepModel:
        from ..models import load_model

        options = self._options
        load = options.loader or load_model
        return load(
            path, max_seq_len=first.max_seq_len, allow_pickle=options.allow_pickle, **arguments
        )

    def _make_drafter(
        self, found: _Found, first: MemoryPlan, model: StepModel, draft_model: StepModel | None
    ) -> SlotDrafter | None:
        """Before the pages: its weights may share a device with them."""
        spec = self._drafter
        if found.head is not None:
            assert isinstance(spec, Eagle3DecodingConfig)
            return make_eagle3(
                spec,
                found.head,
                model,
                self._place,
                max_requests=first.max_batch_size,
                max_rows=first.max_num_tokens,
                window=found.span.window,
            )
        if draft_model is not None:
            assert isinstance(spec, DraftTargetDecodingConfig)
            own_device = None
            if self._apart:
                from .overlap.build import make_own_device

                own_device = make_own_device(self._draft_place, self._place)
            tokenizers = self._tokenizers(draft_model.info.path)
            return DraftTargetDrafter(
                spec,
                draft_model,
                map_vocabulary(model, draft_model, *tokenizers, found.shared),
                self._draft_place,
                DraftSizes(model.vocab_size, first.max_batch_size, self._draft_rows(first)),
                own_device,
            )
        if not isinstance(spec, DrafterConfig) or isinstance(spec, UserDrafterConfig):
            return None
        make = functools.partial(
            make_drafter,
            spec, model, max_requests=first.max_batch_size,
            allow_pickle=self._options.allow_pickle,
        )  # fmt: skip
        return LateDrafter(spec.method, make) if self._late else make()

    def _last_plan(
        self,
        found: _Found,
        first: MemoryPlan,
        model: StepModel,
        draft_model: StepModel | None,
        drafter: SlotDrafter | None,
    ) -> MemoryPlan:
        """With what was loaded, and what steps take besides."""
        scratch_of = [getattr(m, "scratch_bytes", 0) for m in (model, draft_model)]
        taken_there = scratch_of.pop() if self._apart else 0  # on the draft model's device
        taken = sum(scratch_of)
        scratch = getattr(drafter, "scratch_bytes", None)
        taken += scratch(first.max_batch_size) if scratch is not None else 0
        graphs = 0
        if not self._place.is_cpu:
            of_steps, graphs, graphs_there = self._step_bytes(first, model, drafter)
            taken, taken_there = taken + of_steps, taken_there + graphs_there
        memory = self._memory.plan(
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
            draft=draft_model,
            head=_shape_of(found.head),
            reserved=taken + graphs,
            reserved_there=taken_there,
        )
        return dataclasses.replace(memory, graph_bytes=graphs)

    def _step_bytes(
        self, first: MemoryPlan, model: StepModel, drafter: SlotDrafter | None
    ) -> tuple[int, int, int]:
        """On a device: of the steps' buffers, and of graphs there and on the draft model's."""
        from .overlap.build import device_bytes, graph_bytes

        spec = getattr(drafter, "config", self._drafter)
        drafting = drafting_arguments(spec)
        hidden = 0
        if drafter is not None and drafter.needs_hidden:
            hidden = model.hidden_size * model.kv_dtype.itemsize
        buffers = device_bytes(first, self._scheduler, drafting, model.vocab_size, hidden)
        graphs, there = graph_bytes(
            model,
            first,
            self._scheduler,
            self._place,
            drafting,
            drafter,
            synthetic_rates=() if spec is None else spec.synthetic_rates,
        )
        return buffers, graphs, there

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
                f"Eagle3DecodingConfig.model = {spec.model!r}: the head taps a decoder of one "
                "process, and this target runs on several ranks of the CPU; use "
                "tensor_parallel_size=1, or another method"
            )
        if not self._place.is_cpu and self._options.model_impl == "transformers":
            raise UnsupportedConfigError(
                f"Eagle3DecodingConfig.model = {spec.model!r}: on {self._place.name} the head "
                "taps the native decoder; use model_impl='native', device='cpu' or another method"
            )
        weights = read_eagle3(folder_of(spec), allow_pickle=self._options.allow_pickle)
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


def _shape_of(head: Eagle3Weights | None) -> Eagle3Shape | None:
    return None if head is None else head.shape
