"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import ApiError
from .common import Choosing

__all__ = ["CompletionRequest"]

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(Choosing):
    """OpenAI's fields, vLLM's and ours; a prompt is text or token ids, or a list of such."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Any = None

    names_of_off_fields: ClassVar[Mapping[str, str]] = {"best_of": ""}  # check() knows n

    @property
    def names(self) -> Mapping[str, str]:
        return {"prompt": "prompt", "prompt_logprobs": "logprobs"}

    @property
    def prompts(self) -> list[Any]:
        """One entry per prompt. Raises ApiError if there is none."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        if not given:
            raise ApiError(400, "prompt is empty; give at least one token", param="prompt")
        return list(given)

    @property
    def scores_prompt(self) -> bool:
        """The answer is the prompt alone, as who wants its log-probabilities asks for it."""
        return self.max_tokens == 0 and bool(self.echo)

    @property
    def length(self) -> int:
        """Tokens that the engine writes: one at least, which a prompt's scores come with."""
        if self.scores_prompt:
            return 1
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        """Raises ApiError for an answer of nothing, and for ranking, which there is none of."""
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens = 0: ask for at least one token, or set echo = true for the "
                "prompt alone", param="max_tokens",
            )  # fmt: skip
        if self.scores_prompt and self.min_tokens:
            raise ApiError(
                400, f"min_tokens = {self.min_tokens} is greater than max_tokens = 0; leave it out",
                param="min_tokens",
            )  # fmt: skip
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(
                400, f"best_of = {self.best_of} with n = {self.n or 1} is not supported: outputs "
                "are not ranked; ask for n outputs and choose among them", param="best_of",
            )  # fmt: skip
