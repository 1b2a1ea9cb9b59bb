"""LLM: a model, its KV pages and an engine behind generate / chat / stream / generate_async."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from .chat_template import render_chat
from .config import KvCacheConfig, SchedulerConfig, normalize_dtype
from .config_parse import parse_kv_cache_config, parse_scheduler_config
from .drafter_config import DrafterConfig, DraftTargetDecodingConfig
from .drafters import (
    Drafter,
    DraftSession,
    DraftTargetDrafter,
    make_drafter,
    map_vocabulary,
)
from .engine_loop import EngineLoop
from .errors import ConfigError, RequestError
from .llm_async import AsyncRequest, BackgroundStepper
from .memory_plan import DraftPages, MemoryPlan, available_memory_bytes, plan_memory
from .outputs import RequestOutput
from .request_check import EngineLimits
from .request_group import RequestGroup
from .sampling_params import SamplingParams
from .speculation_check import check_build, refuse_unknown_arguments, with_prefix_caching
from .tokenizer import eos_token_ids, load_tokenizer
from .validate import check_bool, check_choice, check_int, show

if TYPE_CHECKING:
    from .models.base import StepModel

__all__ = ["LLM"]

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A decoder-only language model with a paged KV cache and optional speculation.

    model                      folder of an HF-format model; None: the built-in default model
    tokenizer                  folder or object; None: the model's own
    speculative_config         a method's configuration (LookaheadDecodingConfig, ...), dict, JSON,
                               YAML, file; None: plain decoding
    kv_cache_config            KvCacheConfig, dict, ...
    scheduler_config           SchedulerConfig, dict, ...
    dtype                      "auto" (the checkpoint's), "float32", "bfloat16", "float16"
    model_impl                 "auto", "native", "transformers"
    max_draft_len, speculative_decoding_mode
                               what the engine is built for, as in TensorRT-LLM; optional, and must
                               agree with speculative_config
    tensor_parallel_size       1
    seed                       of requests that give none: each draws from a stream of its own
    allow_pickle               read pytorch_model.bin files (weights_only=True) too; off: refused
    enable_prefix_caching      vLLM's name of kv_cache_config.enable_block_reuse

    Greedy output is the same tokens with and without speculation. Raises ConfigError, ModelError.
    Use as a context manager, or close() it; both cancel what still runs.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: Any = None,
        speculative_config: Any = None,
        kv_cache_config: KvCacheConfig | Mapping[str, Any] | str | None = None,
        scheduler_config: SchedulerConfig | Mapping[str, Any] | str | None = None,
        dtype: Any = "auto",
        model_impl: str = "auto",
        max_draft_len: int | None = None,
        speculative_decoding_mode: str | None = None,
        tensor_parallel_size: int = 1,
        seed: int = 0,
        allow_pickle: bool = False,
        enable_prefix_caching: bool | None = None,
        **unknown: Any,
    ) -> None:
        self._closed = True  # until construction is through, there is nothing to close
        refuse_unknown_arguments(unknown, tensor_parallel_size)
        self.speculative_config = check_build(
            speculative_config, max_draft_len, speculative_decoding_mode, tensor_parallel_size
        )
        self.kv_cache_config = with_prefix_caching(
            parse_kv_cache_config(kv_cache_config), enable_prefix_caching
        )
        self.scheduler_config = parse_scheduler_config(scheduler_config)
        dtype = normalize_dtype("dtype", dtype)
        model_impl = check_choice(
            "model_impl", model_impl, ("auto", "native", "transformers"), ConfigError
        )
        seed = check_int("seed", seed, ConfigError, low=-(2**63), high=2**64 - 1)
        allow_pickle = check_bool("allow_pickle", allow_pickle, ConfigError)

        if model is None:
            from .models.default import default_model

            model = default_model()
        self.model_path = Path(model).expanduser()
        self.draft_model: StepModel | None = None
        self.model = self._load_model(dtype, model_impl, allow_pickle)
        self.tokenizer = load_tokenizer(tokenizer, self.model_path)
        self._pages = self._make_pages(self.model, self.memory.num_pages)
        self.model.bind_cache(*self._pages)
        drafter = self._make_drafter(allow_pickle)
        # A drafter may know more than was asked for, such as how many heads a file has.
        known = getattr(drafter, "config", None)
        if isinstance(known, DrafterConfig):
            self.speculative_config = known
        limits = EngineLimits(
            vocab_size=self.model.vocab_size,
            max_seq_len=self.memory.max_seq_len,
            eos_token_ids=eos_token_ids(self.model.info, self.tokenizer),
            speculative_config=self.speculative_config,
            num_pages=self.memory.num_pages,
            tokens_per_block=self.memory.tokens_per_block,
            seed=seed,
        )
        executor = self._make_executor()

        def calibrate() -> None:
            from .step_cost import calibrate_step_cost

            table = calibrate_step_cost(
                executor,
                self.model,
                num_pages=self.memory.num_pages,
                page_size=self.memory.tokens_per_block,
            )
            if drafting is not None:
                drafting.set_step_cost(table)
            if isinstance(drafter, DraftTargetDrafter):
                drafter.set_costs(table, self._measure_draft_model(drafter))

        drafting = None
        if drafter is not None:
            drafting = DraftSession(
                drafter,
                executor,
                hidden_size=self.model.hidden_size,
                max_seq_len=self.memory.max_seq_len,
            )
        self.engine = EngineLoop(
            executor,
            self.model,
            limits=limits,
            memory=self.memory,
            tokenizer=self.tokenizer,
            calibrate=calibrate if self.speculative_config is not None else None,
            drafting=drafting,
        )
        self._stepper = BackgroundStepper(self.engine)
        self._closed = False

    def _load_model(self, dtype: str, model_impl: str, allow_pickle: bool) -> StepModel:
        """Load the weights and set `self.memory`.

        The plan comes first: the model's buffers are sized by its rows, and what cannot fit is
        refused before gigabytes are read. It is made again with what the model really has.
        """
        from .models import load_model
        from .models.config_reader import read_config
        from .models.rope import max_position

        config = read_config(self.model_path)
        spec = self.speculative_config
        draft = None
        if isinstance(spec, DraftTargetDecodingConfig):
            draft = read_config(str(spec.speculative_model))
        kv_dtype = dtype if dtype != "auto" else (config.dtype or "float32")
        scheduler = self.scheduler_config
        first = self._plan_memory(config, kv_dtype, max_position(config.hf), scheduler, draft)
        model = load_model(
            self.model_path,
            dtype=dtype,
            model_impl=model_impl,
            max_rows=first.max_num_tokens,
            max_seq_len=first.max_seq_len,
            allow_pickle=allow_pickle,
        )
        if isinstance(spec, DraftTargetDecodingConfig):
            self.draft_model = load_model(
                str(spec.speculative_model),
                dtype=spec.dtype,
                model_impl=spec.model_impl,
                max_rows=first.max_num_tokens,
                max_seq_len=first.max_seq_len,
                allow_pickle=allow_pickle,
                draft=True,
            )
        self.memory = self._plan_memory(
            model,
            normalize_dtype("model.kv_dtype", model.kv_dtype),
            model.max_position,
            dataclasses.replace(
                self.scheduler_config,
                max_num_tokens=first.max_num_tokens,
                max_seq_len=min(first.max_seq_len, model.max_position),
            ),
            self.draft_model,
        )
        return model

    def _plan_memory(
        self,
        model: Any,
        kv_dtype: str,
        max_position: int,
        scheduler: SchedulerConfig,
        draft: Any = None,
    ) -> MemoryPlan:
        """`model` and `draft`, if there is one, have num_layers, num_kv_heads and head_dim."""
        wanted = self.kv_cache_config.dtype
        if wanted not in ("auto", kv_dtype):
            raise ConfigError(
                f"KvCacheConfig.dtype = {wanted!r}: this model keeps K and V in {kv_dtype}; use "
                f"'auto' or load the model with dtype={wanted!r}"
            )
        config = self.speculative_config
        return plan_memory(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            kv_bytes=4 if kv_dtype == "float32" else 2,
            max_position=max_position,
            draft_len=config.max_draft_len if config is not None else 0,
            kv_cache=self.kv_cache_config,
            scheduler=scheduler,
            free_bytes=available_memory_bytes(),
            draft=self._draft_pages(draft),
        )

    def _draft_pages(self, draft: Any) -> DraftPages | None:
        config = self.speculative_config
        if draft is None or not isinstance(config, DraftTargetDecodingConfig):
            return None
        dtype = getattr(draft, "kv_dtype", None) or (
            config.dtype if config.dtype != "auto" else draft.dtype or "float32"
        )
        element = 4 if normalize_dtype("draft model's dtype", dtype) == "float32" else 2
        per_token = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * element
        return DraftPages(per_token, config.max_kv_tokens)

    def _make_pages(self, model: StepModel, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V pages [layers, pages, kv_heads, page size, head_dim] of a model.

        Zeroed pages are given out by the operating system when they are first written, so a large
        pool costs memory only as it fills.
        """
        shape = (
            model.num_layers,
            num_pages,
            model.num_kv_heads,
            self.memory.tokens_per_block,
            model.head_dim,
        )
        return torch.zeros(shape, dtype=model.kv_dtype), torch.zeros(shape, dtype=model.kv_dtype)

    def _make_drafter(self, allow_pickle: bool) -> Drafter | None:
        config, draft = self.speculative_config, self.draft_model
        if isinstance(config, DraftTargetDecodingConfig):
            assert draft is not None
            return DraftTargetDrafter(
                config,
                draft,
                self._make_pages(draft, self.memory.draft_num_pages),
                map_vocabulary(
                    self.model, draft, self.tokenizer, load_tokenizer(None, draft.info.path)
                ),
                vocab_size=self.model.vocab_size,
                max_requests=self.memory.max_batch_size,
                max_rows=self.memory.max_num_tokens,
                max_len=draft.max_position,
                enable_block_reuse=self.kv_cache_config.enable_block_reuse,
            )
        if not isinstance(config, DrafterConfig):
            return None
        return make_drafter(config, self.model, allow_pickle=allow_pickle)

    def _measure_draft_model(self, drafter: DraftTargetDrafter) -> dict[int, float]:
        from .step_cost import measure_step_cost

        rows, seconds = measure_step_cost(
            drafter.model,
            num_pages=self.memory.draft_num_pages,
            page_size=self.memory.tokens_per_block,
            max_rows=32,
        )
        return dict(zip(rows, seconds, strict=True))

    def _make_executor(self) -> Any:
        from . import _core
        from .config import LookaheadDecodingConfig

        config = self.speculative_config
        how: dict[str, Any] = {"method": "none"}
        if isinstance(config, LookaheadDecodingConfig):
            # (1,1,0) is plain decoding and must cost no more.
            if not config.is_plain:
                how = {"method": "lookahead", "lookahead": config.wng}
        elif isinstance(config, DrafterConfig):
            how = {"method": "external", "external_max_draft_len": config.max_draft_len}
        elif config is not None:
            ngram = config.to_dict()
            del ngram["method"], ngram["adaptive"]
            how = {"method": "ngram", "ngram": ngram}
        return _core.Executor(
            *self._pages,
            vocab_size=self.model.vocab_size,
            max_batch_size=self.memory.max_batch_size,
            max_seq_len=self.memory.max_seq_len,
            max_num_tokens=self.memory.max_num_tokens,
            adaptive=config.adaptive if config is not None else False,
            enable_chunked_prefill=self.scheduler_config.enable_chunked_prefill,
            enable_block_reuse=self.kv_cache_config.enable_block_reuse,
            **how,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Decode prompts together; results in the order of the prompts.

        prompts          text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list
                         of these (a list of integers is one prompt)
        sampling_params  one for all, or one per prompt; None: SamplingParams()
        use_tqdm         progress bar on stderr, if that is a terminal; or a tqdm-like callable

        Raises RequestError before any work if one of the requests is invalid. A request that fails
        while it runs has finish_reason "error"; the others go on.
        """
        items = self._split_prompts(prompts)
        return self._decode(items, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """generate() for one conversation, a list of {"role", "content"}, or several of them.

        chat_template  None: the tokenizer's own; "vicuna", "llama2", "chatml", a Jinja template or
                       its file
        """
        several = bool(messages) and isinstance(messages[0], Sequence)
        conversations = messages if several else [messages]
        items = [self._chat_prompt(m, chat_template, add_generation_prompt) for m in conversations]
        return self._decode(items, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Snapshots of one request, one per step that delivered tokens, the last with metrics.

        `outputs[0].delta_text` and `.delta_segments` are what is new. Closing the iterator cancels
        the request. Raises RequestError at the call, before any work.
        """
        text, ids = self._encode(prompt)
        return self._stream(
            RequestGroup(self.engine, ids, sampling_params or SamplingParams(), prompt=text)
        )

    def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncRequest:
        """Start one request in the background: `await` it, or iterate with `async for`.

        Raises RequestError at the call, before any work.
        """
        text, ids = self._encode(prompt)
        return AsyncRequest(
            self.engine, self._stepper, ids, sampling_params or SamplingParams(), text
        )

    def get_metrics(self) -> dict[str, Any]:
        """Sums since construction: steps, tokens, drafts, times, memory (docs/metrics.md)."""
        return self.engine.get_metrics()

    def reset_prefix_cache(self) -> int:
        """Forget the cached pages that no running request uses; returns how many they were."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Cancel what runs and refuse further work. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.engine.close()
        self._stepper.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of one prompt."""
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys == {"prompt_token_ids"}:
                prompt = prompt["prompt_token_ids"]
            elif keys in ({"prompt"}, {"prompt", "prompt_token_ids"}):
                text = prompt["prompt"]
                if "prompt_token_ids" in keys:
                    return text, list(prompt["prompt_token_ids"])
                prompt = text
            else:
                raise RequestError(
                    f"prompt with keys {sorted(map(str, keys))}: expected {{'prompt': text}} or "
                    "{'prompt_token_ids': ids}"
                )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"prompt = {show(prompt)}: the model folder has no tokenizer; pass token ids "
                    "or LLM(tokenizer=...)"
                )
            return prompt, list(self.tokenizer(prompt)["input_ids"])
        if hasattr(prompt, "tolist"):  # a NumPy array or a torch tensor of ids
            prompt = prompt.tolist()
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
            raise RequestError(
                f"prompt = {show(prompt)}: expected text or a list of token ids, got "
                f"{type(prompt).__name__}"
            )
        ids: Sequence[Any] = prompt
        return None, list(ids)

    def _chat_prompt(
        self, messages: Any, chat_template: str | None, add_generation_prompt: bool
    ) -> tuple[str | None, list[int]]:
        if self.tokenizer is None:
            raise RequestError(
                "messages: the model folder has no tokenizer; pass LLM(tokenizer=...)"
            )
        text = render_chat(
            self.tokenizer,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
        )
        return text, list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _split_prompts(
        self, prompts: Prompt | Sequence[Prompt]
    ) -> list[tuple[str | None, list[int]]]:
        if hasattr(prompts, "tolist"):
            prompts = prompts.tolist()
        one = isinstance(prompts, (str, Mapping)) or (
            isinstance(prompts, Sequence)
            and len(prompts) > 0
            and not isinstance(prompts[0], (str, Mapping, Sequence))
            and not hasattr(prompts[0], "tolist")
        )
        if one:
            return [self._encode(prompts)]  # type: ignore[arg-type]
        if not isinstance(prompts, Sequence):
            raise RequestError(
                f"prompts = {show(prompts)}: expected text, token ids or a list of them, got "
                f"{type(prompts).__name__}"
            )
        return [self._encode(prompt) for prompt in prompts]  # type: ignore[arg-type]

    def _submit_all(
        self,
        items: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestGroup]:
        """Submit all or, if one is invalid, none."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            if isinstance(sampling_params, (str, Mapping)):
                raise RequestError(
                    f"sampling_params = {show(sampling_params)}: expected SamplingParams or a list "
                    "of them; SamplingParams.from_dict reads a dict"
                )
            params = list(sampling_params)
            if len(params) != len(items):
                raise RequestError(
                    f"sampling_params has {len(params)} entries for {len(items)} prompts; give one "
                    "for all or one per prompt"
                )
        for i, entry in enumerate(params):
            if not isinstance(entry, SamplingParams):
                raise RequestError(
                    f"sampling_params[{i}] = {show(entry)}: expected SamplingParams, got "
                    f"{type(entry).__name__}; SamplingParams.from_dict reads a dict"
                )
        for i, ((_, ids), entry) in enumerate(zip(items, params, strict=True)):
            try:
                self.engine.validate(ids, entry)
            except RequestError as error:
                if len(items) == 1:
                    raise
                raise type(error)(f"prompts[{i}]: {error}") from None
        groups: list[RequestGroup] = []
        try:
            for (text, ids), entry in zip(items, params, strict=True):
                groups.append(RequestGroup(self.engine, ids, entry, prompt=text))
        except BaseException:
            for group in groups:
                group.cancel()
            raise
        return groups

    def _decode(
        self,
        items: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        groups = self._submit_all(items, sampling_params)
        if groups:
            self._run(groups, use_tqdm)
        return [group.snapshot() for group in groups]

    def _run(self, groups: list[RequestGroup], use_tqdm: bool | Callable[..., Any]) -> None:
        from .progress import Progress

        states = [state for group in groups for state in group.states]
        progress = Progress(states, use_tqdm)
        try:
            self.engine.run(states, on_step=progress.update)
        except BaseException:
            for state in states:
                self.engine.cancel(state)
            raise
        finally:
            progress.close()

    def _stream(self, group: RequestGroup) -> Iterator[RequestOutput]:
        try:
            while True:
                if not group.finished and not group.has_news and not self.engine.step():
                    self.engine.run(group.states)
                if not group.has_news:
                    continue
                output = group.snapshot()
                if output.finished or any(out.delta_token_ids for out in output.outputs):
                    yield output
                if output.finished:
                    return
        finally:
            group.cancel()
