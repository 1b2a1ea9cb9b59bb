"""What an external loop needs of an engine: an LLM has it, and so has one behind a server
(serve/triton/remote.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..config.engine import KvCacheConfig
from ..request.resolve import EngineLimits, ResolvedRequest
from ..request.sampling_params import SamplingParams
from ..text.outputs import RequestOutput
from ..text.prompts import PromptReader

__all__ = ["Generator"]


class _Engine(Protocol):
    @property
    def limits(self) -> EngineLimits: ...

    @property
    def numerics(self) -> str: ...

    def resolve(self, ids: Sequence[int], params: SamplingParams, /) -> ResolvedRequest: ...


class Generator(Protocol):
    """LLM's attributes of the same names."""

    tokenizer: Any
    model: Any
    kv_cache_config: KvCacheConfig
    prompts: PromptReader

    @property
    def engine(self) -> _Engine: ...

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = True
    ) -> list[RequestOutput]: ...
