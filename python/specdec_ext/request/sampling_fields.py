"""The fields of SamplingParams, which documents and checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.base import Spelled
from .external_draft import ExternalDraftTokensConfig

__all__ = ["LogitsProcessor", "SamplingFields"]

# (token_ids so far: prompt and output, scores [V]) -> scores [V]; a function of these alone.
LogitsProcessor = Callable[[list[int], Any], Any]


@dataclass(frozen=True)
class SamplingFields(metaclass=Spelled):
    """What the checks read; see SamplingParams."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    bad_words: Sequence[str | Sequence[int]] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] | None = field(default=None, repr=False)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    seed: int | None = None
    speculative_config: Any = None
    acceptance: str = "exact_match"
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    acceptance_threshold: float | None = None
    cache_salt: str = ""
    priority: int = 0
    external_draft: ExternalDraftTokensConfig | None = None
    prediction: Any = field(default=None, repr=False)
    structured_outputs: Any = None
    return_generation_logits: bool = False
    return_steps: bool = False

    @property
    def greedy(self) -> bool:
        """No random number is drawn: the largest score wins, the smaller id on ties."""
        return self.temperature == 0.0 or self.top_k == 1
