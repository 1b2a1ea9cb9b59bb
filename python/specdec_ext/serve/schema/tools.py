"""Functions that a chat's answer calls: `tools` and `tool_choice`, held to their schemas.

An answer that has to call a function is a JSON object {"name": ..., "arguments": {...}}; the
schemas of the functions are its grammar. Whether to call one is never left to the model: chat
templates say in many ways how a model writes a call of its own accord, and none of them is read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from ...config.validate import show
from ...errors import RequestError
from ...request.structured_outputs import StructuredOutputs, check_structured_outputs
from ..constraints import refusal_of
from ..errors import ApiError

__all__ = ["ToolCalls"]

MAX_TOOLS = 128


class ToolCalls:
    """The call that an answer has to be.

    form         that the answer must have
    instruction  what the model is told about it, in front of the conversation
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self.form = _form(functions)
        listed = "\n".join(json.dumps(function) for function in functions.values())
        self.instruction = (
            "Answer with a call of one of these functions, as JSON "
            f'{{"name": function, "arguments": object}}:\n{listed}'
        )

    @classmethod
    def of(cls, tools: Any, tool_choice: Any) -> ToolCalls | None:
        """None: the answer is text. Raises ApiError for what is no function, and for "auto"."""
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
            raise ApiError(
                400, 'tool_choice = "auto" is not supported: whether to call a function is not '
                'left to the model; use "required", one function, or "none"', param="tool_choice",
            )  # fmt: skip
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

    @staticmethod
    def read(text: str) -> list[dict[str, Any]] | None:
        """`tool_calls` of an answer; None: it was cut before its end."""
        try:
            call = json.loads(text)
        except ValueError:
            return None
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        return [{"id": f"call-{secrets.token_hex(12)}", "type": "function", "function": function}]


def _no_choice(tool_choice: Any) -> ApiError:
    return ApiError(
        400, f'tool_choice = {show(tool_choice)}: expected "none", "required" or {{"type": '
        '"function", "function": {"name": ...}}', param="tool_choice",
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


def _form(functions: Mapping[str, Mapping[str, Any]]) -> StructuredOutputs:
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
    try:
        form = check_structured_outputs({"json": {"anyOf": calls, "$defs": definitions}})
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
