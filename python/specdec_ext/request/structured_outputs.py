"""The form that a request's output must have: `SamplingParams.structured_outputs`, in every shape.

What is well formed here may still be refused when its grammar is compiled (text/grammar.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.validate import check_bool, show, unknown_key
from ..errors import RequestError, UnsupportedRequestError

__all__ = ["MAX_GRAMMAR_CHARS", "StructuredOutputs", "check_structured_outputs"]

FIELD = "SamplingParams.structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object")
# vLLM's and TensorRT-LLM's other fields; what they say when they say nothing here.
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_fallback")
_REFUSED = {
    "structural_tag": "write the tags and their schemas as a grammar",
    "disable_additional_properties": 'say "additionalProperties": false in the schema',
}
MAX_GRAMMAR_CHARS = 256 * 1024


@dataclass(frozen=True)
class StructuredOutputs:
    """One constraint in its normal form.

    kind     "json" (a schema), "json_object" (any object), "regex", "choice" or "grammar" (Lark or
             GBNF)
    text     the schema or the choices as JSON, the expression or the grammar; "" of json_object
    flexible_whitespace  JSON may have whitespace wherever it may stand; else it is written as
             {"a": 1, "b": [2, 3]}
    whitespace_pattern   what whitespace there may be, a regular expression; None: any
    """

    kind: str
    text: str
    flexible_whitespace: bool = False
    whitespace_pattern: str | None = None


def check_structured_outputs(value: Any) -> StructuredOutputs | None:
    """`value` in its normal form; None where it asks for plain text.

    value  {"json": schema} | {"regex": expression} | {"choice": texts} | {"grammar": Lark or GBNF}
           | {"json_object": true}, an object with these attributes, or OpenAI's response_format

    Raises RequestError (UnsupportedRequestError for what is known and not served).
    """
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        if not any(hasattr(value, kind) for kind in KINDS):
            raise RequestError(
                f"{FIELD} = {show(value)}: expected an object with one of {', '.join(KINDS)}, got "
                f"{type(value).__name__}"
            )
        names = (*KINDS, *_OPTIONS, *_REFUSED)
        value = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if "type" in value:
        value = _response_format(value)
    known = (*KINDS, *_OPTIONS, *_REFUSED)
    given: dict[str, Any] = {}
    for key, entry in value.items():
        if key not in known:
            raise unknown_key(FIELD, str(key), known, RequestError)
        # False is a schema, and one of the two ways of whitespace; elsewhere it asks for nothing.
        if entry is None or (entry is False and key not in ("json", "disable_any_whitespace")):
            continue
        given[key] = entry
    for key, remedy in _REFUSED.items():
        if key in given:
            raise UnsupportedRequestError(
                f"{FIELD}.{key} = {show(given[key])} is not supported; {remedy}"
            )
    kinds = [kind for kind in KINDS if kind in given]
    if not kinds:
        if given:
            raise RequestError(f"{FIELD} has {', '.join(given)} and none of {', '.join(KINDS)}")
        return None
    if len(kinds) > 1:
        raise RequestError(f"{FIELD} has {' and '.join(kinds)}: give one constraint")
    return _of_kind(kinds[0], given)


def _response_format(value: Mapping[Any, Any]) -> dict[str, Any]:
    """OpenAI's {"type": "text" | "json_object" | "json_schema", ...}."""
    kind, rest = value["type"], {key: entry for key, entry in value.items() if key != "type"}
    if kind in ("text", "json_object") and not rest:
        return {} if kind == "text" else {"json_object": True}
    named = rest.pop("json_schema", None) if kind == "json_schema" else None
    # /v1/responses has the same keys without "json_schema" around them.
    named = rest if named is None else named
    if kind != "json_schema" or (named is not rest and rest) or not isinstance(named, Mapping):
        raise RequestError(
            f'{FIELD} = {show(dict(value))}: expected {{"type": "text"}}, {{"type": "json_object"}}'
            ' or {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
        )
    extra = set(named) - {"name", "schema", "strict", "description"}
    schema = named.get("schema")
    if extra or not isinstance(schema, Mapping):
        raise RequestError(
            f"{FIELD}.json_schema = {show(dict(named))}: expected name, schema (an object), strict "
            "and description"
        )
    return {"json": schema}


def _of_kind(kind: str, given: Mapping[str, Any]) -> StructuredOutputs:
    where, value = f"{FIELD}.{kind}", given[kind]
    flexible = "disable_any_whitespace" in given and not check_bool(
        f"{FIELD}.disable_any_whitespace", given["disable_any_whitespace"], RequestError
    )
    pattern = given.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise RequestError(
            f"{FIELD}.whitespace_pattern = {show(pattern)}: expected a regular expression"
        )
    if kind == "json":
        text = _schema(where, value)
    elif kind == "json_object":
        check_bool(where, value, RequestError)
        text = ""
    elif kind == "choice":
        text = _choices(where, value)
    else:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{where} = {show(value)}: expected a text that is not empty")
        text = value
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"{where} has {len(text)} characters, limit {MAX_GRAMMAR_CHARS}; make it smaller"
        )
    if kind not in ("json", "json_object"):
        flexible, pattern = False, None
    return StructuredOutputs(kind, text, flexible, pattern)


def _schema(where: str, value: Any) -> str:
    """A JSON schema as its text: an object, its text, or a pydantic model's class."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_CHARS:
            return value  # refused by its length
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} = {show(value)}: not JSON ({error})") from None
    value = {} if value is True else value  # any JSON
    if not isinstance(value, (Mapping, bool)):
        raise RequestError(
            f"{where} = {show(value)}: expected a JSON schema, got {type(value).__name__}"
        )
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not a JSON schema ({show(str(error))})") from None


def _choices(where: str, value: Any) -> str:
    texts = list(value) if isinstance(value, (list, tuple)) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{where} = {show(value)}: expected a list of texts, none of them empty")
    return json.dumps(texts)
