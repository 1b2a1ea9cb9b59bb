"""Functions that a chat's answer calls: `tools` and `tool_choice`, held to their schemas.

An answer that has to call a function is a JSON object {"name": ..., "arguments": {...}}; the
schemas of the functions are its grammar. Whether to call one is left to models whose template has
a format of calls that is known (tool_format.py): their answer is text until a call begins.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from ...config.validate import show
from ...errors import RequestError
from ...request.finite_schema import never_ends
from ...request.structured_outputs import StructuredOutputs, check_structured_outputs
from ..constraints import refusal_of
from ..errors import ApiError
from ..tool_format import CallReader, ToolFormat

__all__ = ["ToolCalls", "asks_the_model"]

MAX_TOOLS = 128


def asks_the_model(tools: Any, tool_choice: Any) -> bool:
    """Whether to call a function is the model's to say."""
    return bool(tools) and tool_choice in (None, "auto")


class ToolCalls:
    """The calls that an answer has to be, or may have.

    form       that the answer must have
    listed     for the chat template, where that lists functions; None: `instruction` does
    instruction  what the model is told about it, in front of the conversation
    """

    def __init__(
        self,
        functions: Mapping[str, Mapping[str, Any]],
        written: ToolFormat | None = None,
        *,
        several: bool = False,
    ) -> None:
        """written  the model's own format: the answer may have a call in it, with `several` more
        than one. None: it is a call."""
        try:
            schema = _schema(functions)
        except RecursionError:
            raise ApiError(400, "tools: parameters are nested too deep", param="tools") from None
        self._is_free = written is not None
        self.listed: list[Any] | None = None
        self.instruction: str | None = None
        if written is None:
            self.form = _form({"json": schema})
            lines = "\n".join(json.dumps(function) for function in functions.values())
            self.instruction = (
                "Answer with a call of one of these functions, as JSON "
                f'{{"name": function, "arguments": object}}:\n{lines}'
            )
        else:
            if never_ends(schema):
                raise ApiError(
                    400, "tools: no finite text has a function's parameters; make what refers to "
                    "itself optional", param="tools",
                )  # fmt: skip
            self.form = _form({"grammar": written.grammar(schema, several=several)})
            self.listed = [{"type": "function", "function": f} for f in functions.values()]

    @classmethod
    def of(
        cls,
        tools: Any,
        tool_choice: Any,
        written: ToolFormat | None = None,
        *,
        several: bool = True,
    ) -> ToolCalls | None:
        """None: the answer is text. Raises ApiError for what is no function.

        written, several  as __init__ has them, for a choice that asks_the_model()
        """
        functions = _functions(tools)
        named = isinstance(tool_choice, Mapping)
        if not functions:
            if named or tool_choice == "required":
                raise ApiError(400, "tool_choice needs tools", param="tool_choice")
            if tool_choice not in (None, "none", "auto"):
                raise _no_choice(tool_choice)
            return None
        if tool_choice == "none":
            return None
        if tool_choice in (None, "auto"):
            if written is None:
                raise ApiError(
                    400, 'tool_choice = "auto" is not supported for this model: its chat template '
                    "has no format of calls that is known here; use \"required\", one function, or "
                    '"none"', param="tool_choice",
                )  # fmt: skip
            return cls(functions, written, several=several)
        if tool_choice == "required":
            return cls(functions)
        function = tool_choice.get("function") if named else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not named or tool_choice.get("type") != "function" or not isinstance(name, str):
            raise _no_choice(tool_choice)
        if name not in functions:
            raise ApiError(
                400, f"tool_choice names {show(name)}, tools has {', '.join(functions)}",
                param="tool_choice",
            )  # fmt: skip
        return cls({name: functions[name]})

    def reader(self) -> AnswerReader:
        """What takes one choice's answer apart."""
        return AnswerReader(CallReader() if self._is_free else _OneCall())


class AnswerReader:
    """One choice's answer as it comes: its text, and calls of functions once they are complete."""

    def __init__(self, source: CallReader | _OneCall | None = None) -> None:
        """source  None: all of it is text"""
        self._source = source
        self.num_calls = 0

    def read(self, piece: str, finish_reason: str | None) -> tuple[str, list[dict[str, Any]]]:
        """Text and `tool_calls` that the next piece brings; at the end what was held back, too."""
        if self._source is None:
            return piece, []
        text, found = self._source.feed(piece)
        if finish_reason is not None:
            text += self._source.finish()
        calls = [
            {
                "id": f"call-{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in found
        ]
        self.num_calls += len(calls)
        return text, calls


class _OneCall:
    """An answer that is one call; cut before its end it is text."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, piece: str) -> tuple[str, list[dict[str, Any]]]:
        self._text += piece
        if not self._text.endswith("}"):
            return "", []
        try:
            call = json.loads(self._text)
        except ValueError:
            return "", []
        self._text = ""
        return "", [call]

    def finish(self) -> str:
        return self._text


def _no_choice(tool_choice: Any) -> ApiError:
    return ApiError(
        400, f'tool_choice = {show(tool_choice)}: expected "none", "auto", "required" or '
        '{"type": "function", "function": {"name": ...}}', param="tool_choice",
    )  # fmt: skip


def _bad(where: str, what: str) -> ApiError:
    return ApiError(400, where + what, param=where)


def _functions(tools: Any) -> dict[str, Mapping[str, Any]]:
    """The functions by name."""
    functions: dict[str, Mapping[str, Any]] = {}
    if tools is None:
        return functions
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ApiError(400, f"tools: expected a list of at most {MAX_TOOLS}", param="tools")
    for i, tool in enumerate(tools):
        where = f"tools.{i}"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise _bad(where, f" = {show(tool)}: only functions are supported")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name or name in functions:
            raise _bad(where, f".function.name = {show(name)}: expected a name of its own")
        if set(function) - {"name", "description", "parameters", "strict"}:
            raise _bad(where, ".function has unknown fields")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise _bad(where, f".function.parameters = {show(parameters)}: expected a JSON schema")
        functions[name] = function
    return functions


def _schema(functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A schema of the calls. The functions' own schemas keep their definitions: references of
    theirs are from their own roots."""
    calls = []
    definitions: dict[str, Any] = {}
    for i, (name, function) in enumerate(functions.items()):
        place = f"#/$defs/function{i}"
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        definitions[f"function{i}"] = _moved(parameters, place)
        properties = {"name": {"const": name}, "arguments": {"$ref": place}}
        calls.append({
            "type": "object", "properties": properties, "required": ["name", "arguments"],
            "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": calls, "$defs": definitions}


def _form(wanted: Mapping[str, Any]) -> StructuredOutputs:
    try:
        form = check_structured_outputs(wanted)
    except RequestError as error:
        raise refusal_of(error, "tools") from None
    assert form is not None
    return form


def _moved(schema: Any, place: str) -> Any:
    """The schema with its local references below `place`."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(value, place) for value in schema]
    return schema
