"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...errors import RequestError
from ...text.chat_template import check_template_kwargs
from ...text.chat_template import text_of as text_of_parts
from ..errors import ApiError
from .common import Choosing, Strict

__all__ = ["ChatRequest", "Message", "TextPart", "conversation", "template_kwargs", "text_of"]


class TextPart(Strict):
    type: str
    text: str | None = None
    # Another part's content: refused by its type.
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None
    filename: Any = None
    detail: Any = None
    # In a part of an earlier answer
    refusal: Any = None
    annotations: Any = None
    logprobs: Any = None
    token_sources: Any = None
    steps: Any = None


class Message(Strict):
    """One turn; `name` goes to the chat template, which may use it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    # In an assistant's turn that this server did not write
    refusal: Any = None
    audio: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    annotations: Any = None
    reasoning_content: Any = None


class ChatRequest(Choosing):
    """OpenAI's fields, vLLM's and ours; what is only accepted at some values is in common.OFF."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Any = None
    audio: Any = None
    best_of: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    # Served here (tools.py), not by /v1/responses.
    names_of_off_fields: ClassVar[Mapping[str, str]] = {"tools": "", "tool_choice": ""}

    @property
    def names(self) -> Mapping[str, str]:
        length = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "max_tokens": length, "logprobs": "top_logprobs"}

    @property
    def length(self) -> int | None:
        """Tokens of the answer; None: as many as fit."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise ApiError(
                400, f"max_tokens = {old} and max_completion_tokens = {new} are two names of one "
                "limit; give one of them", param="max_tokens",
            )  # fmt: skip
        return old if new is None else new

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def text_of(content: str | list[TextPart] | None, where: str) -> str:
    """The text of a turn's content. Raises ApiError for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        return text_of_parts([part.model_dump(exclude_none=True) for part in content], where)
    except RequestError as error:
        raise ApiError(400, str(error), param=where) from None


def _calls(tool_calls: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """Calls of an earlier answer as chat templates take them, and each as a text. Texts keep the
    client's own words of the arguments: other spaces or escapes would be other tokens than those
    whose K/V is cached. "" and nothing are no arguments; an object is taken as it is."""
    calls = []
    for call in tool_calls if isinstance(tool_calls, list) else [tool_calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        try:
            if not isinstance(function, Mapping) or not isinstance(function["name"], str):
                raise TypeError
            name, given = function["name"], function.get("arguments")
            words = given or "{}" if isinstance(given, str | None) else json.dumps(given)
            arguments = json.loads(words)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ApiError(
                400, f"{where}.tool_calls: expected functions with a name, and with arguments that "
                "are JSON", param=where,
            ) from None  # fmt: skip
        one = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if isinstance(call.get("id"), str):
            one["id"] = call["id"]
        calls.append((one, f'{{"name": {json.dumps(name)}, "arguments": {words}}}'))
    return calls


def template_kwargs(given: Any) -> dict[str, Any]:
    """`chat_template_kwargs`, checked. Raises ApiError."""
    try:
        return check_template_kwargs(given)
    except RequestError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from None


def conversation(messages: Sequence[Message], *, keeps_calls: bool = False) -> list[dict[str, Any]]:
    """The turns as chat templates take them. Raises ApiError for other media.

    keeps_calls  calls of earlier answers are given to the template, which knows how the model
                 writes them; else they are text, as an answer that has to be a call is written
    """
    turns = []
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        if message.role == "function" or message.function_call:
            raise ApiError(
                400, f"{where}: functions are called as tools here; give a call as `tool_calls` "
                "and its result in a turn of role 'tool'", param=where,
            )  # fmt: skip
        if message.audio is not None:
            raise ApiError(400, f"{where}: only text is supported", param=where)
        if message.refusal is not None:
            raise ApiError(
                400, f"{where}.refusal: chat templates know no refusals; give its text as content",
                param=f"{where}.refusal",
            )  # fmt: skip
        role = "system" if message.role == "developer" else message.role
        if role == "user" and message.content in (None, []):
            raise ApiError(400, f"{where}.content: a user's turn needs a text", param=where)
        content = text_of(message.content, f"{where}.content")
        turn: dict[str, Any] = {"role": role, "content": content}
        calls = _calls(message.tool_calls, where) if message.tool_calls else []
        if calls and keeps_calls:
            turn["tool_calls"] = [call for call, _ in calls]
        elif calls:
            turn["content"] = "\n".join(filter(None, [content, *(text for _, text in calls)]))
        if message.name is not None:
            turn["name"] = message.name
        if isinstance(message.tool_call_id, str):
            turn["tool_call_id"] = message.tool_call_id
        turns.append(turn)
    return turns
