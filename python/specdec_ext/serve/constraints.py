"""Output that must have a form: the one place where a request's wish for it is read.

This version has no grammars, so that a wish is refused; what they need from a request is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.validate import show
from .errors import ApiError

__all__ = ["refuse_constraints"]


def _refuse(param: str, value: Any) -> None:
    raise ApiError(
        400, f"{param} = {show(value)} is not supported in this version: output cannot be held to "
        "a grammar; leave it out", param=param,
    )  # fmt: skip


def refuse_constraints(
    response_format: Any = None,
    structured_outputs: Any = None,
    *,
    param: str = "response_format",
) -> None:
    """Raises ApiError unless the fields ask for plain text.

    response_format  OpenAI's {"type": "text" | "json_object" | "json_schema", ...}; `param` names
                     it, in /v1/responses it is text.format
    """
    if structured_outputs not in (None, {}):
        _refuse("structured_outputs", structured_outputs)
    plain = isinstance(response_format, Mapping) and dict(response_format) == {"type": "text"}
    if response_format is not None and not plain:
        _refuse(param, response_format)
