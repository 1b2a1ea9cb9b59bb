"""LLM: a model, its KV pages and an engine behind generate / chat / stream / generate_async."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .config.build_check import (
    check_build,
    check_device,
    check_model_path,
    check_threads_variable,
    refuse_unknown_arguments,
    with_prefix_caching,
    with_sizes,
    with_swap_space,
)
from .config.dtypes import normalize_dtype
from .config.engine import KvCacheConfig, SchedulerConfig
from .config.parse import parse_kv_cache_config, parse_scheduler_config
from .config.quantization import Quantization
from .config.ranks import resolve_tensor_parallel_size, world_of
from .config.validate import check_bool, check_choice, check_int, show
from .engine.background import AsyncRequest, BackgroundStepper
from .engine.build import EngineBuilder
from .engine.model_options import ModelOptions
from .engine.ranks import check_draft_device, devices_for, make_team
from .engine.request_group import RequestGroup
from .engine.step_cost import StepCost
from .errors import ConfigError, RequestError, SyntheticAcceptanceWarning
from .extras import named_extras
from .models.load import memory_errors
from .request.resolve import ResolvedRequest
from .request.sampling_params import SamplingParams
from .text.outputs import RequestOutput
from .text.prompts import Prompt, PromptReader, TokenizedPrompt

__all__ = ["LLM"]


class LLM:
    """A decoder-only language model with a paged KV cache and optional speculation.

    model                      folder of a Hugging Face model, or a GGUF file; None: the built-in
                               default model
    tokenizer                  folder or object; None: the model's own
    speculative_config         how to draft. "auto": from the text itself and with the drafter that
                               is shipped for the model, each where it pays
                               (docs/methods/sources.md). A method's configuration
                               (LookaheadDecodingConfig, ...), a dict, JSON, YAML, a file, or a list
                               of these. None: plain decoding
    kv_cache_config            KvCacheConfig, dict, JSON, YAML or file
    scheduler_config           SchedulerConfig, dict, JSON, YAML or file
    dtype                      "auto" (the checkpoint's; for a GGUF file each weight's own width),
                               "float32", "bfloat16", "float16"
    quantization               "int8", "int4", "fp8" (e4m3) or "fp8_w8a8" (activations in e4m3,
                               too): round float weights to this width at load. A mapping says
                               more: {"method": "int4", "group_size": 128, "embeddings": "keep",
                               "head": "int8"}. For native families, on a device for models of 16
                               bits (docs/models.md). None: leave them
    model_impl                 "auto", "native", "transformers"
    max_draft_len, speculative_decoding_mode
                               what the engine is built for, as in TensorRT-LLM. Optional; must
                               agree with speculative_config
    tensor_parallel_size       ranks that share the model's forward pass, on the CPU or with a GPU
                               each. This object starts and ends the other ranks, unless torchrun
                               has started all (docs/tensor_parallel.md). None: as many as torchrun
                               has, else 1
    seed                       for requests without a seed; each draws from a separate stream
    allow_pickle               also read pytorch_model.bin files (weights_only=True); False: refuse
    enable_prefix_caching      vLLM's name for kv_cache_config.enable_block_reuse
    device                     "auto" (the first CUDA device that can be used, else the CPU),
                               "cpu", "cuda", "cuda:N"; with several ranks "cuda" is the first N,
                               "cuda:N" those from N on, "cuda:A,B,..." a list; docs/device.md
    numerics                   "exact": a row's bits do not depend on the step it is in, so
                               near-ties fall as in plain decoding; a model that cannot do this is
                               refused, and on a device drafts more than 24 deep. "fast":
                               near-ties may fall differently, ranks add up partial sums
                               (docs/tensor_parallel.md), and many rows round attention to
                               bfloat16 where a processor multiplies that, and multiply quantised
                               weights as bfloat16 where it has tiles (AMX). "auto": exact on the
                               CPU, fast on a device (docs/exactness.md)
    max_batch_size, max_seq_len, max_num_tokens
                               the fields of scheduler_config; None: as there
    swap_space                 vLLM's name for kv_cache_config.host_cache_size, in GiB

    Greedy output has the same tokens with and without speculation.

    Use it as a context manager, or call close(). Both cancel running requests, and so does deleting
    the object. After Ctrl-C it can be used as before; requests of other callers go on. It works in
    the process that made it, not in a fork.

    Raises ConfigError, ModelError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: Any = None,
        speculative_config: Any = "auto",
        kv_cache_config: KvCacheConfig | Mapping[str, Any] | str | None = None,
        scheduler_config: SchedulerConfig | Mapping[str, Any] | str | None = None,
        dtype: Any = "auto",
        quantization: str | Mapping[str, Any] | None = None,
        model_impl: str = "auto",
        max_draft_len: int | None = None,
        speculative_decoding_mode: str | None = None,
        tensor_parallel_size: int | None = None,
        seed: int = 0,
        allow_pickle: bool = False,
        enable_prefix_caching: bool | None = None,
        device: str = "auto",
        numerics: str = "auto",
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_num_tokens: int | None = None,
        swap_space: float | None = None,
        **unknown: Any,
    ) -> None:
        self._closed = True  # until construction has succeeded there is nothing to close
        if tensor_parallel_size is None and "tp_size" in unknown:  # as other projects call it
            tensor_parallel_size = unknown.pop("tp_size")
        refuse_unknown_arguments(unknown)
        check_threads_variable()
        world = world_of()
        tensor_parallel_size = resolve_tensor_parallel_size(tensor_parallel_size, world)
        self.speculative_config = check_build(
            speculative_config, max_draft_len, speculative_decoding_mode, tensor_parallel_size
        )
        kv_cache = with_prefix_caching(
            parse_kv_cache_config(kv_cache_config), enable_prefix_caching
        )
        self.kv_cache_config = with_swap_space(kv_cache, swap_space)
        self.scheduler_config = with_sizes(
            parse_scheduler_config(scheduler_config),
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
        )
        dtype = normalize_dtype("dtype", dtype)
        model_impl = check_choice(
            "model_impl", model_impl, ("auto", "native", "transformers"), ConfigError
        )
        narrowed = None if quantization is None else Quantization.of(quantization)
        seed = check_int("seed", seed, ConfigError, low=-(2**63), high=2**64 - 1)
        allow_pickle = check_bool("allow_pickle", allow_pickle, ConfigError)
        device = check_device(device)
        numerics = check_choice("numerics", numerics, ("auto", "exact", "fast"), ConfigError)
        synthetic = self.speculative_config and self.speculative_config.synthetic_acceptance
        if synthetic:
            warnings.warn(
                f"synthetic acceptance at {synthetic['mean_acceptance_length']:g} tokens per step: "
                "the text is NOT the model's; for measuring speed only",
                SyntheticAcceptanceWarning,
                stacklevel=2,
            )

        devices = devices_for(tensor_parallel_size, device)  # refused before anything is read
        device = devices[0]
        check_draft_device(self.speculative_config, devices)
        if model is None:
            from .models.default import default_source

            with named_extras("making a folder of the built-in model"):
                model = default_source(dtype=dtype, model_impl=model_impl, quantization=narrowed)
        self.model_path = Path(check_model_path(model)).expanduser()
        self._team = None
        if tensor_parallel_size > 1:
            self._team = make_team(tensor_parallel_size, self.model_path, model_impl, devices)
        options = ModelOptions(
            path=self.model_path,
            speculative_config=self.speculative_config,
            kv_cache_config=self.kv_cache_config,
            scheduler_config=self.scheduler_config,
            dtype=dtype,
            model_impl=model_impl,
            allow_pickle=allow_pickle,
            device=device,
            numerics=numerics,
            quantization=narrowed,
            team=self._team,
        )
        self._builder = EngineBuilder(options, tokenizer=tokenizer, seed=seed)
        try:
            with memory_errors(self.model_path), named_extras(f"{self.model_path}:"):
                parts = self._builder.build()
        except BaseException:
            self._end_ranks()
            raise
        self.speculative_config = parts.speculative_config
        self.model, self.draft_model = parts.model, parts.draft_model
        self.device = parts.device
        self.tokenizer, self.memory, self.engine = parts.tokenizer, parts.memory, parts.engine
        self.prompts = PromptReader(
            self.tokenizer, self.memory.max_seq_len, self.model.max_position
        )
        self._stepper = BackgroundStepper(self.engine)
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Decode prompts together and return the results in the order of the prompts.

        prompts          text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list
                         of these (a list of integers is one prompt)
        sampling_params  one for all, or a list with one per prompt; None: SamplingParams()
        use_tqdm         True: show a progress bar on stderr if that is a terminal; or a callable
                         that is used like tqdm

        Raises RequestError before any work if one of the requests is invalid. A request that fails
        while it runs has finish_reason "error"; other requests are not affected.
        """
        items = self.prompts.read_all(prompts)
        return self._decode(items, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """generate() for one conversation, a list of {"role": ..., "content": ...}, or several. A
        content is a text, or a list of parts {"type": "text", "text": ...}.

        chat_template          None: the tokenizer's own; or "vicuna", "llama2", "chatml", a Jinja
                               template or the path of one
        add_generation_prompt  end the prompt with the start of the assistant's turn
        chat_template_kwargs   more variables for the template, {"enable_thinking": False}

        Raises RequestError, ConfigError for a template that does not exist.
        """
        if not isinstance(messages, (list, tuple)):
            raise RequestError(
                f"messages = {show(messages)}: expected a list of turns, got "
                f"{type(messages).__name__}; put a single turn into a list"
            )
        several = bool(messages) and isinstance(messages[0], (list, tuple))
        conversations = messages if several else [messages]
        items = [
            self.prompts.read_chat(
                m, chat_template, add_generation_prompt, template_kwargs=chat_template_kwargs
            )
            for m in conversations
        ]
        return self._decode(items, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Iterate over snapshots of one request, one per step that delivered tokens, or
        with `return_steps` one per step.

        `outputs[0].delta_text` and `.delta_segments` hold what is new; the last snapshot has the
        metrics. Closing the iterator cancels the request. Raises RequestError at the call, before
        any work.
        """
        text, request = self._resolve(prompt, sampling_params)
        return self._stream(RequestGroup(self.engine, request, prompt=text))

    def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncRequest:
        """Start one request in the background: `await` it, or iterate with `async for`.

        Raises RequestError at the call, before any work.
        """
        text, request = self._resolve(prompt, sampling_params)
        return AsyncRequest(self.engine, self._stepper, request, text)

    def get_metrics(self) -> dict[str, Any]:
        """Sums since construction: steps, tokens, drafts, times, memory (docs/metrics.md)."""
        return self.engine.get_metrics()

    def measure_step_cost(self, time_limit_s: float = 2.0) -> StepCost | None:
        """Measure how long a forward pass takes: T(rows, context), a _core.StepCost.

        Call it while no request runs; it drops cached prefixes. Returns None if the cache has too
        few pages to measure.

        time_limit_s  seconds for the times by rows; longer contexts take half as much again
        """
        self.reset_prefix_cache()
        return self._builder.measure_cost(time_limit_s)

    def reset_prefix_cache(self) -> int:
        """Forget the cached pages that no running request uses; return their number."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Cancel running requests and refuse further work. May be called twice."""
        if self._closed:
            return
        self.engine.close()
        self._stepper.join()
        self._end_ranks()
        self._closed = True

    def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.abandon()

    def _end_ranks(self) -> None:
        if self._team is not None and not self._team.outlives:
            self._team.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _resolve(
        self, prompt: Prompt, sampling_params: SamplingParams | None
    ) -> tuple[str | None, ResolvedRequest]:
        """The text of one prompt, and its request checked against the engine."""
        params = SamplingParams() if sampling_params is None else sampling_params
        _check_params("sampling_params", params)
        text, ids = self.prompts.read(prompt)
        return text, self.engine.resolve(ids, params)

    def _submit_all(
        self,
        items: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestGroup]:
        """Submit all requests or, if one is invalid, none."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            if isinstance(sampling_params, (str, Mapping)) or not isinstance(
                sampling_params, Iterable
            ):
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
            _check_params(f"sampling_params[{i}]", entry)
        self.engine.require_room(sum(entry.n for entry in params))
        resolved = []
        for i, ((_, ids), entry) in enumerate(zip(items, params, strict=True)):
            try:
                resolved.append(self.engine.resolve(ids, entry))
            except RequestError as error:
                if len(items) == 1:
                    raise
                raise type(error)(f"prompts[{i}]: {error}") from None
        groups: list[RequestGroup] = []
        try:
            for (text, _), request in zip(items, resolved, strict=True):
                groups.append(RequestGroup(self.engine, request, prompt=text, watched=False))
        except BaseException:
            for group in groups:
                group.cancel()
            raise
        return groups

    def _decode(
        self,
        items: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        groups = self._submit_all(items, sampling_params)
        if groups:
            self._run(groups, use_tqdm)
        return [group.snapshot() for group in groups]

    def _run(self, groups: list[RequestGroup], use_tqdm: bool | Callable[..., Any]) -> None:
        from .text.progress import Progress

        states = [state for group in groups for state in group.states]
        progress: Progress | None = None
        try:
            progress = Progress(states, use_tqdm)
            self.engine.run(states, on_step=progress.update)
        except BaseException:
            for state in states:
                self.engine.cancel(state)
            raise
        finally:
            if progress is not None:
                progress.close()

    def _stream(self, group: RequestGroup) -> Iterator[RequestOutput]:
        try:
            while True:
                if not group.finished and not group.has_news and not self.engine.step():
                    self.engine.run(group.states)
                if not group.has_news:
                    continue
                output = group.snapshot()
                if output.finished or any(
                    out.delta_token_ids or out.delta_steps for out in output.outputs
                ):
                    yield output
                if output.finished:
                    return
        except GeneratorExit:
            raise  # perhaps in a destructor: the group is dropped too, and cancels without a lock
        except BaseException:
            group.cancel()
            raise


def _check_params(name: str, params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"{name} = {show(params)}: expected SamplingParams, got {type(params).__name__}; "
            "SamplingParams.from_dict reads a dict"
        )
