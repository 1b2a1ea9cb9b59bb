"""Output that must have a form: the one place where a request's wish for it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..config.validate import show
from ..errors import RequestError
from ..request.structured_outputs import FIELD, StructuredOutputs, check_structured_outputs
from .errors import ApiError

__all__ = ["constraint", "refusal_of"]


def constraint(
    response_format: Any = None,
    structured_outputs: Any = None,
    *,
    param: str = "response_format",
) -> tuple[StructuredOutputs | None, str]:
    """The form that a request asks for, and the field that it stands in.

    response_format     OpenAI's {"type": "text" | "json_object" | "json_schema", ...}; `param`
                        names it, in /v1/responses it is text.format
    structured_outputs  vLLM's {"json" | "regex" | "choice" | "grammar" | "json_object": ...}

    Raises ApiError for what is no form, and where both are given.
    """
    if response_format is not None and not (
        isinstance(response_format, Mapping) and "type" in response_format
    ):
        raise ApiError(
            400, f'{param} = {show(response_format)}: expected an object with "type"', param=param
        )
    found: tuple[StructuredOutputs | None, str] = (None, param)
    for field, value in ((param, response_format), ("structured_outputs", structured_outputs)):
        if isinstance(value, Mapping) and field == "structured_outputs" and "type" in value:
            raise ApiError(400, f"{field}.type: give it as {param}", param=field)
        try:
            form = check_structured_outputs(value)
        except RequestError as error:
            raise refusal_of(error, field) from None
        if form is not None and found[0] is not None:
            raise ApiError(400, f"{param} and {field} both ask for a form; give one", param=field)
        found = (form, field) if form is not None else found
    return found


def refusal_of(error: RequestError, field: str) -> ApiError:
    """A refusal of a form in the words of the field that the client used: where that is not
    structured_outputs itself, a schema is all that can be wrong in it."""
    text = str(error)
    if field != "structured_outputs":
        text = re.sub(re.escape(FIELD) + r"\.json\b", lambda _: f"the schema of {field}", text)
    return ApiError(400, text.replace(FIELD, field), param=field)
