"""POST /tokenize and /detokenize, vLLM's."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError
from .chat import Message
from .common import Strict

__all__ = ["DetokenizeRequest", "TokenizeRequest"]


class TokenizeRequest(Strict):
    """A text, or a conversation that the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Any = None
    tools: Any = None
    tool_choice: Any = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises ApiError unless it is one of the two."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give prompt or messages, one of them", param="prompt")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ApiError(
                400, "add_special_tokens: a chat template writes its special tokens itself; leave "
                "it out", param="add_special_tokens",
            )  # fmt: skip
        for name in ("add_generation_prompt", "chat_template_kwargs", "tools", "tool_choice"):
            if self.messages is None and getattr(self, name) is not None:
                raise ApiError(400, f"{name} belongs to messages; leave it out", param=name)


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[int]
