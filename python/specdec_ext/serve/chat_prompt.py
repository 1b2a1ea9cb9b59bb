"""A conversation as the model reads it: the one place where turns, functions and the template's
variables come together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..text.prompts import PromptReader, TokenizedPrompt
from .schema.chat import Message, conversation, template_kwargs
from .schema.tools import ToolCalls, asks_the_model
from .serving import Serving

__all__ = ["ChatPrompt", "chat_prompt"]


@dataclass(frozen=True)
class ChatPrompt:
    """What is given to the template.

    calls  that the answer has to be, or may have; None: it is text
    """

    turns: list[dict[str, Any]]
    calls: ToolCalls | None
    add_generation_prompt: bool
    template_kwargs: dict[str, Any]

    def read(self, reader: PromptReader) -> TokenizedPrompt:
        """Its text and its tokens. Raises RequestError."""
        tools = None if self.calls is None else self.calls.listed
        return reader.read_chat(
            self.turns, None, self.add_generation_prompt, tools, self.template_kwargs
        )


async def chat_prompt(
    serving: Serving,
    messages: Sequence[Message],
    *,
    tools: Any = None,
    tool_choice: Any = None,
    several: bool = True,
    add_generation_prompt: bool | None = None,
    chat_template_kwargs: Any = None,
) -> ChatPrompt:
    """The fields of a chat's request, checked. Raises ApiError.

    several  the answer may have more than one call
    """
    given = template_kwargs(chat_template_kwargs)
    written = await serving.tool_format() if asks_the_model(tools, tool_choice) else None
    calls = ToolCalls.of(tools, tool_choice, written, several=several)
    # Whatever this answer may be, the earlier ones keep the tokens that the model has written.
    keeps_calls = written is not None or (
        any(message.tool_calls for message in messages) and await serving.writes_calls()
    )
    turns = conversation(messages, keeps_calls=keeps_calls)
    if calls is not None and calls.instruction is not None:
        turns = _instructed(turns, calls.instruction)
    return ChatPrompt(turns, calls, add_generation_prompt is not False, given)


def _instructed(turns: list[dict[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """The conversation with an instruction in its system turn."""
    first = turns[0] if turns[0]["role"] == "system" else None
    content = instruction if first is None else f"{first['content']}\n\n{instruction}"
    return [{"role": "system", "content": content}, *turns[first is not None :]]
