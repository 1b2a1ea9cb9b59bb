"""From checked configurations to an engine: models, one memory plan, pages, drafter, executor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.methods import DrafterConfig, UserDrafterConfig
from ..config.parse import SpeculativeConfig, is_adaptive
from ..config.sources import AutoDecodingConfig, CompositeDecodingConfig
from ..drafters import SlotDrafter, shipped_drafter
from ..errors import ConfigError
from ..models.host_arrays import as_torch
from ..models.kv_storage import LayerPool
from ..models.place import Place, resolve_device
from ..models.windows import AttentionSpan
from ..request.resolve import EngineLimits
from ..text.tokenizer import eos_token_ids, load_tokenizer
from .draft_device import own_device_of, place_of_pages
from .drafting_arguments import drafting_arguments
from .executor import make_executor
from .host_pool import HostPool
from .kv_pages import KvPages
from .loop import EngineLoop
from .memory_plan import MemoryPlan, pages_in_window
from .model_options import ModelOptions
from .models import ModelLoader
from .served_cost import ServedCost
from .slot_drafting import SlotDrafting
from .step_cost import TIME_LIMIT_S, StepCost, measure_cost
from .user_drafting import UserDrafting

if TYPE_CHECKING:
    from ..models.base import StepModel

__all__ = ["EngineBuilder", "EngineParts"]

Pages = tuple[Any, Any]


@dataclass(frozen=True)
class EngineParts:
    """What was built.

    speculative_config  as given, completed by what the drafter's files say
    draft_model         the second model of draft-target decoding
    device              where the models run: "cpu", "cuda:0", ...
    """

    model: StepModel
    draft_model: StepModel | None
    tokenizer: Any
    memory: MemoryPlan
    speculative_config: SpeculativeConfig | None
    engine: EngineLoop
    device: str


def check_depth(config: SpeculativeConfig | None) -> None:
    """Raises ConfigError if drafts go deeper than exact mode on a device allows."""
    from ..models.device_decoder import EXACT_DRAFT_DEPTH

    if config is not None and config.deepest_draft > EXACT_DRAFT_DEPTH:
        raise ConfigError(
            f"{config!r} has drafts up to {config.deepest_draft} deep; with numerics = 'exact' on "
            f"a device {EXACT_DRAFT_DEPTH} at most, because every token is computed as if it were "
            "a draft of that depth; make drafts shorter, or leave numerics at 'auto'"
        )


class EngineBuilder:
    """Builds one engine.

    tokenizer  LLM's argument
    seed       of requests that give none

    Raises ConfigError, ModelError.
    """

    def __init__(self, options: ModelOptions, *, tokenizer: Any, seed: int) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._speculative = self._planned = options.speculative_config
        self._kv_cache, self._scheduler = options.kv_cache_config, options.scheduler_config
        self._seed = seed
        self.draft_model: StepModel | None = None
        self._pools: list[Any] = []  # what has a release()
        self._narrow: tuple[LayerPool, ...] = ()
        self._host_pool: HostPool | None = None  # of what preempted requests held

    def build(self) -> EngineParts:
        """Load the models, then everything that is sized by them."""
        options = self._options
        self.place = resolve_device(options.device)
        # For a model that runs ahead; whether the host makes its plans is known when it is loaded.
        depth = 1 if self.place.on_cuda else 0
        self._scheduler = options.scheduler_config.with_depth(depth)
        options = dataclasses.replace(options, scheduler_config=self._scheduler)
        late = False
        if isinstance(self._speculative, AutoDecodingConfig):
            drafter = shipped_drafter(options.path, self.place, options.model_impl)
            self._speculative = self._planned = self._speculative.with_drafter(drafter)
            options = dataclasses.replace(options, speculative_config=self._speculative)
            late = drafter is not None
        if options.numerics == "exact" and not self.place.is_cpu:
            check_depth(self._speculative)
        loaded = ModelLoader(options, self.place, self._load_tokenizers, late=late).load()
        model = self.model = loaded.model
        if model.impl != "native":
            self._scheduler = self._options.scheduler_config.with_depth(0)
        self.draft_model, self.memory = loaded.draft_model, loaded.memory
        self.tokenizer = load_tokenizer(self._tokenizer, self._options.path)
        memory = self.memory
        # A device's narrow windows have pools of their own; on the CPU memory goes by layer anyway.
        narrow = (
            () if self.place.is_cpu else zip(memory.narrow_layers, memory.narrow_pages, strict=True)
        )
        made = self._make_pages(model, memory.num_pages, tuple(narrow))
        self._pages, self._narrow = made.tensors, made.narrow
        model.bind_cache(*self._pages, *([self._narrow] if self._narrow else []))
        if self._options.team is not None and memory.narrow_windows and self.place.is_cpu:
            self._options.team.narrow(memory.narrow_windows)
        by_number: list[Any] = [*self._pages]  # what goes by a page's number
        own: Any = loaded.drafter
        apart = own_device_of(own)
        if hasattr(own, "pages_of"):
            where = place_of_pages(own, self.place, self.memory)
            pages = self._make_pages(own.pages_of, self.memory.draft_num_pages, place=where)
            own.bind_cache(*pages.tensors)
            by_number += [*pages.tensors, *getattr(own, "feature_pages", ())]
            if hasattr(own, "release"):
                self._pools.append(own)
        if count := self.memory.host_num_pages:
            if self._options.team is not None:
                self._options.team.make_host_pool(count)  # all ranks at once: it may take long
            self._host_pool = HostPool(
                by_number,
                count,
                narrow=[(as_torch(pool.k), as_torch(pool.v)) for pool in self._narrow],
                pinned=self.place.on_cuda,
                on_stream=self._on_stream,
                streams={} if apart is None else {2: apart.stream, 3: apart.stream},
            )
        # A drafter may know more than was asked for, such as how many heads a file has.
        known = getattr(loaded.drafter, "config", None)
        if isinstance(known, DrafterConfig):
            given = self._speculative
            if isinstance(given, CompositeDecodingConfig):
                known = given.with_drafter(known)
            self._speculative = known
        return EngineParts(
            model,
            self.draft_model,
            self.tokenizer,
            self.memory,
            self._speculative,
            self._make_engine(loaded.drafter),
            self.place.name,
        )

    @property
    def _on_stream(self) -> bool:
        """Steps are enqueued on a device's stream; on the CPU the host runs them."""
        return not self.place.is_cpu

    @property
    def _torch_pages(self) -> Pages:
        k, v = self._pages
        return as_torch(k), as_torch(v)

    def _make_engine(self, drafter: SlotDrafter | None = None) -> EngineLoop:
        return self._make_enqueued(drafter) if self._on_stream else self._make_immediate(drafter)

    def engine_for(self, config: SpeculativeConfig | None) -> EngineLoop:
        """After build(): another engine over the same model and pages, without loading anything.

        For methods that draft without a model, with no more drafts than build() planned rows for.
        The engines made before must be idle and are used no more.
        """
        planned = 0 if self._planned is None else self._planned.max_draft_len
        needs_drafter = isinstance(config, (DrafterConfig, CompositeDecodingConfig))
        if needs_drafter or (config and config.max_draft_len > planned):
            raise ConfigError(
                f"engine_for: {config!r} needs more than the {planned} drafts that this engine was "
                "planned for, or a drafter; build a new LLM"
            )
        self._speculative = config
        return self._make_engine()

    def _limits(self) -> EngineLimits:
        return EngineLimits(
            vocab_size=self.model.vocab_size,
            max_seq_len=self.memory.max_seq_len,
            eos_token_ids=eos_token_ids(
                self.model.info.eos_token_ids, self.model.info.vocab_size, self.tokenizer
            ),
            speculative_config=self._speculative,
            num_pages=self.memory.num_pages,
            tokens_per_block=self.memory.tokens_per_block,
            seed=self._seed,
            max_queued_requests=self._scheduler.max_queued_requests,
            max_input_len=self._scheduler.max_input_len,
            pages_in_window=self._pages_in_window,
            max_position=self.model.max_position,
        )

    def _pages_in_window(self, prompt: int, step: int) -> int:
        span = AttentionSpan(self.memory.attention_window, self.memory.sink_tokens)
        return pages_in_window(self._kv_cache, self._scheduler, span, prompt, step)

    def _make_enqueued(self, drafter: SlotDrafter | None) -> EngineLoop:
        from .overlap.build import make_pipeline, record_graphs
        from .overlap.loop import OverlapLoop

        if self.model.info.impl == "native" and self.model.info.numerics == "exact":
            check_depth(self._speculative)  # which a drafter's file may have completed
        pipeline = make_pipeline(
            self.model,
            self._torch_pages,
            self.memory,
            self._scheduler,
            self.place,
            drafting_arguments(self._speculative),
            drafter=drafter,
            adaptive=is_adaptive(self._speculative),
            enable_block_reuse=self._kv_cache.enable_block_reuse,
            synthetic_rates=() if self._speculative is None else self._speculative.synthetic_rates,
            narrow=self._narrow,
            host_pool=self._host_pool,
            host_bytes_per_second=self._host_bytes_per_second(),
        )
        record_graphs(pipeline, self.memory)

        return OverlapLoop(
            pipeline,
            self.model,
            limits=self._limits(),
            memory=self.memory,
            tokenizer=self.tokenizer,
            calibrate=self._served_cost(pipeline.executor),
            release_pages=self._release_pages,
            drafting=self._user_drafting(pipeline.executor),
        )

    def _user_drafting(self, executor: Any) -> UserDrafting | None:
        config = self._speculative
        if not isinstance(config, UserDrafterConfig):
            return None
        vocab_size, max_seq_len = self.model.vocab_size, self.memory.max_seq_len
        return UserDrafting(config, executor, vocab_size=vocab_size, max_seq_len=max_seq_len)

    def _make_immediate(self, drafter: SlotDrafter | None) -> EngineLoop:
        model = self.model
        executor = self._make_executor(self._pages)
        drafting: UserDrafting | SlotDrafting | None = self._user_drafting(executor)
        if drafter is not None:
            drafting = SlotDrafting(drafter, executor, hidden_size=model.hidden_size)
            executor = drafting.front
        return EngineLoop(
            executor,
            model,
            limits=self._limits(),
            memory=self.memory,
            tokenizer=self.tokenizer,
            calibrate=self._served_cost(executor),
            spares_others=self._scheduler.max_prefill_slowdown is not None,
            release_pages=self._release_pages,
            drafting=drafting,
        )

    def _served_cost(self, executor: Any) -> Callable[[], ServedCost | None]:
        """What tells T(rows, context) to the executor, before the first adaptive step. On a device
        served steps correct no guess: the model is timed then and there."""
        served = ServedCost(
            self.model,
            lambda cost: executor.set_step_cost(*cost.columns),
            recorded=self._pass_timer is not None,
        )

        def begin() -> ServedCost | None:
            if served.is_guess and self._on_stream:
                executor.reset_prefix_cache()  # what is overwritten may be published
                served.measured(self.measure_cost())
            served.start()
            # What a pass takes on a device the host does not see.
            return served if self.place.is_cpu else None

        return begin

    def measure_cost(self, time_limit_s: float = TIME_LIMIT_S) -> StepCost | None:
        """T(rows, context) of the built engine's model; None: its pages are too few to tell. It
        overwrites pages: call it while no request runs and nothing is published."""
        rows = self.memory.max_num_tokens
        return measure_cost(
            self.model,
            self._pages,
            max_rows=rows,
            time_limit_s=time_limit_s,
            recorded=self._pass_timer,
        )

    @functools.cached_property
    def _pass_timer(self) -> Callable[[Any], float] | None:
        """What times a pass where steps are recorded as graphs; None: the host launches them."""
        if not self.place.on_cuda:
            return None
        from .overlap.build import make_pass_timer

        return make_pass_timer(self.model, self._scheduler, self.place)

    def _make_pages(
        self,
        model: Any,
        num_pages: int,
        narrow: Sequence[tuple[tuple[int, ...], int]] = (),
        place: Place | None = None,
    ) -> KvPages:
        where = place or self.place
        pages = KvPages(model, num_pages, self.memory.tokens_per_block, where, narrow)
        self._pools.append(pages)
        return pages

    def _release_pages(self) -> None:
        # A draft model's published pages are not the executor's to drop.
        for pages in self._pools[: 1 if self._kv_cache.enable_block_reuse else None]:
            pages.release()
        if self._host_pool is not None:
            self._host_pool.release()
        if self._options.team is not None:
            self._options.team.release_pages()

    def _load_tokenizers(self, draft: Path) -> tuple[Any, Any]:
        """The target's, and that of the draft model in this folder."""
        return load_tokenizer(self._tokenizer, self._options.path), load_tokenizer(None, draft)

    def _make_executor(self, pages: Pages) -> Any:
        config = self._speculative
        how = drafting_arguments(config)
        if config is not None:
            how["synthetic_acceptance_rates"] = list(config.synthetic_rates)
        executor = make_executor(
            self.model.vocab_size,
            self.memory,
            self._scheduler,
            how,
            pages,
            adaptive=is_adaptive(self._speculative),
            enable_block_reuse=self._kv_cache.enable_block_reuse,
            host_bytes_per_second=self._host_bytes_per_second() or 0.0,
        )
        if self._host_pool is not None:
            executor.bind_host_pages(self._host_pool.core)
        return executor

    def _host_bytes_per_second(self) -> float | None:
        """Speed of copies to the host's pool; None: there is none, or the stream measures it."""
        pool, speed = self._host_pool, self._kv_cache.host_link_gb_per_s
        if pool is None:
            return None
        if speed is not None:
            return speed * 1e9
        return None if self._on_stream else pool.bytes_per_second()
