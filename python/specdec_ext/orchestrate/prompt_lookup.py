"""Prompt lookup as an external loop: a pool of n-grams per request, one verification per call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..config.ngram import NGramDecodingConfig
from ..config.parse import parse_speculative_config
from ..config.validate import check_int
from ..errors import ConfigError
from ..request.external_draft import ExternalDraftTokensConfig
from ..request.sampling_params import SamplingParams
from .loop import ExternalLoop, Proposer, Running
from .pool import PromptLookupPool

if TYPE_CHECKING:
    from ..text.outputs import RequestOutput
    from .generator import Generator

__all__ = ["prompt_lookup", "prompt_lookup_loop", "stream_prompt_lookup"]


class _Lookup(Proposer):
    def __init__(self, config: NGramDecodingConfig) -> None:
        self._config = config

    def propose(self, running: Sequence[Running]) -> list[ExternalDraftTokensConfig | None]:
        return [self._propose(request) for request in running]

    def _propose(self, request: Running) -> ExternalDraftTokensConfig | None:
        config = self._config
        if request.pool is None:
            request.pool = PromptLookupPool(
                config.max_draft_len,
                config.max_matching_ngram_size,
                config.is_keep_all,
                config.is_use_oldest,
            )
        request.pool.extend(request.text)
        drafts = request.pool.propose(request.text)[: request.room]
        return ExternalDraftTokensConfig(drafts) if drafts else None


def _config(config: Any) -> NGramDecodingConfig:
    parsed = parse_speculative_config(config, "ngram")
    if parsed is None:
        return NGramDecodingConfig()
    assert isinstance(parsed, NGramDecodingConfig)
    if parsed.is_public_pool:
        raise ConfigError(
            "NGramDecodingConfig.is_public_pool = True: the pools of an external loop belong to "
            "one request each; use the in-engine form, or is_public_pool = False"
        )
    if parsed.draft_len_steps or parsed.synthetic_rates:
        raise ConfigError(
            "NGramDecodingConfig with draft_len_schedule, max_concurrency or synthetic acceptance: "
            "these are options of an engine, an external loop has none; use the in-engine form"
        )
    return parsed


def prompt_lookup_loop(
    llm: Generator,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    config: Any = None,
) -> ExternalLoop:
    """The loop of prompt_lookup(), to be stepped by the caller."""
    return ExternalLoop(llm, prompts, sampling_params, _Lookup(_config(config)))


def prompt_lookup(
    llm: Generator,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    config: Any = None,
) -> list[RequestOutput]:
    """Decode prompts together, drafts copied from each request's own text.

    llm      needs kv_cache_config.enable_block_reuse; its own speculative_config is not used
    prompts, sampling_params
             as for LLM.generate; no `n`, presence or frequency penalty
    config   NGramDecodingConfig, dict, "[K,M]" (None: its defaults). `adaptive` belongs to the
             in-engine form: here a draft is as long as what is found, at most max_draft_len

    Raises ConfigError, RequestError before any work.
    """
    return prompt_lookup_loop(llm, prompts, sampling_params, config=config).run()


def stream_prompt_lookup(
    llm: Generator,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    config: Any = None,
    streaming_interval: int = 1,
) -> Iterator[list[RequestOutput]]:
    """As prompt_lookup(); yields the outputs of all prompts every `streaming_interval` iterations.

    Their delta fields hold what is new. Raises at the call, before any work.
    """
    interval = check_int("streaming_interval", streaming_interval, ConfigError, low=1)
    return prompt_lookup_loop(llm, prompts, sampling_params, config=config).stream(interval)
