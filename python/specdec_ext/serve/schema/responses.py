"""POST /v1/responses, as far as it is about text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from ...config.validate import show
from ..errors import ApiError
from .chat import TextPart, text_of
from .common import Sampled, Strict

__all__ = ["ResponsesRequest"]

LOGPROBS = "message.output_text.logprobs"
CALLS = "calls of functions and their results go to /v1/chat/completions"


class InputItem(Strict):
    """A turn of the conversation, or an item of an earlier answer's output."""

    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    type: str | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponsesRequest(Sampled):
    """OpenAI's fields and vLLM's; what is only accepted at some values is in common.OFF."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: dict[str, Any] | None = None
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    truncation: Any = None

    # A prompt here is a stored template, elsewhere it is the text.
    names_of_off_fields: ClassVar[Mapping[str, str]] = {"prompt": "prompt_template"}

    @field_validator("input", mode="before")
    @classmethod
    def _refuse_what_is_no_message(cls, given: Any) -> Any:
        """By its type: its fields are not those of a message."""
        for i, item in enumerate(given if isinstance(given, list) else ()):
            kind = item.get("type") if isinstance(item, Mapping) else None
            if kind not in (None, "message"):
                raise ApiError(
                    400, f"input.{i}: only messages are supported, with a role, got type "
                    f"{show(kind)}; {CALLS}", param=f"input.{i}",
                )  # fmt: skip
            if isinstance(item, Mapping) and item.get("role") == "tool":
                raise ApiError(
                    400, f"input.{i}.role: there are no turns of role 'tool' here; {CALLS}",
                    param=f"input.{i}.role",
                )  # fmt: skip
        return given

    @model_validator(mode="after")
    def _refuse_usage_in_every_event(self) -> ResponsesRequest:
        if self.usage_in_every_chunk:
            raise ApiError(
                400, "stream_options.continuous_usage_stats = true is not supported here: only the "
                "last event of a response has usage; leave it out",
                param="stream_options.continuous_usage_stats",
            )  # fmt: skip
        return self

    @property
    def names(self) -> Mapping[str, str]:
        return {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}

    @property
    def num_logprobs(self) -> int | None:
        """Raises ApiError for what `include` cannot name."""
        for name in self.include or ():
            if name != LOGPROBS:
                raise ApiError(
                    400, f"include: {show(name)} is not supported, only {LOGPROBS!r}",
                    param="include",
                )  # fmt: skip
        if self.include:
            return self.top_logprobs or 0
        if self.top_logprobs is not None:
            raise ApiError(400, f"top_logprobs needs include = [{LOGPROBS!r}]",
                           param="top_logprobs")  # fmt: skip
        return None

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation. Raises ApiError for items that are no text."""
        turns = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        if not self.input:
            raise ApiError(
                400, "input is an empty list; give a text or at least one message", param="input"
            )
        for i, item in enumerate(self.input):
            if item.role is None:
                raise ApiError(400, f"input.{i}: a message needs a role", param=f"input.{i}")
            role = "system" if item.role == "developer" else item.role
            turns.append({"role": role, "content": text_of(item.content, f"input.{i}.content")})
        return turns
