"""Errors as OpenAI words them: a status and {"error": {message, type, param, code}}.

Bodies are ASCII JSON: what they quote may hold anything that JSON can, half a surrogate pair too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..config.validate import show
from ..errors import CapacityError, EngineError, QueueFullError, RequestError
from ..log import logger

__all__ = [
    "ApiError",
    "api_error",
    "client_gone",
    "draining",
    "engine_failed",
    "engine_stopped",
    "error_response",
    "install_handlers",
    "timed_out",
]

# Status -> (type, code) where the error names no other code.
_KINDS: Mapping[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "queue_full"),
    499: ("client_closed_request", "client_closed_request"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "service_unavailable"),
    504: ("server_error", "timeout"),
}
RETRY_SECONDS = 1
# How the errors of requests begin that ask for what cannot be (cpp/engine/decide.cc,
# engine/grammar_masks.py), and those of requests for which the model has no scores
# (cpp/engine/deliver.cc).
_AT_FAULT = ("no token is allowed here", "the grammar of structured_outputs failed")
_BAD_SCORES = "the model's scores "
# Members of unions as pydantic names them -> what a client is told of them; lists have brackets.
_MEMBERS: Mapping[str, str] = {
    "str": "a text", "int": "an integer", "float": "a number", "bool": "true or false",
}  # fmt: skip
_FIELD = re.compile(r"SamplingParams\.(\w+)")


class ApiError(Exception):
    """What a client is told. `param` is the field of the request that is at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.type, usual = _KINDS.get(status, ("invalid_request_error", None))
        self.code = code or usual

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def client_gone() -> ApiError:
    return ApiError(499, "the client closed the connection before the answer was there")


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504, f"the answer took more than {seconds:g} s, the server's limit; ask for fewer tokens"
    )


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down; send the request to another one")


def engine_stopped() -> ApiError:
    return ApiError(
        503,
        "the engine has stopped, and the server's log says why; send the request to another server",
        code="engine_error",
    )


def engine_failed(error: str | None, form: str) -> ApiError:
    """What a request that ended with an error is told: why, where the words are the engine's own
    and tell of nothing inside; else that the log has them.

    error  CompletionOutput.error
    form   the field that asks for the answer's form, which the engine calls structured_outputs
    """
    text = error or ""
    if text.startswith(_AT_FAULT):
        return ApiError(400, text.replace("structured_outputs", form))
    if text.startswith(_BAD_SCORES):
        return ApiError(500, f"{text}; the model cannot answer this request", code="engine_error")
    return ApiError(
        500,
        "the request failed while it ran; the server's log says why, at the id that the answer's "
        "X-Request-Id gives",
        code="engine_error",
    )


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """What an error of the package means for a client. What is no refusal is a 500 without details,
    which go to the log.

    names  how the request calls what SamplingParams has by another name, and its "prompt"; None:
           the request is not known
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, f"the queue is full ({error})")
    if isinstance(error, RequestError):
        known = names or {}
        found = _FIELD.match(str(error))
        param = known.get(found[1], found[1]) if found else known.get("prompt")
        text = _FIELD.sub(lambda field: known.get(field[1], field[1]), str(error))
        code = "context_length_exceeded" if isinstance(error, CapacityError) else None
        return ApiError(400, text, param=param, code=code)
    if isinstance(error, EngineError):
        return ApiError(503, "the engine does not serve any more; the server's log says why")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log says what happened")


def error_response(error: ApiError) -> Response:
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_SECONDS)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        json.dumps(error.body()),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


def _is_member(part: Any) -> bool:
    """A part of a place names a member of a union, not a field."""
    return isinstance(part, str) and (part in _MEMBERS or part.endswith("]"))


def _num_named(error: Mapping[str, Any]) -> int:
    """The parts of its place that this server has named: not a field that is the client's alone."""
    return len(error["loc"]) - (error.get("type") == "extra_forbidden")


def _is_other_type(error: Mapping[str, Any], depth: int) -> bool:
    """The whole value at this depth is of another type."""
    return len(error["loc"]) == depth and str(error.get("type", "")).endswith("_type")


def _told(errors: Sequence[Mapping[str, Any]], depth: int = 0) -> Mapping[str, Any]:
    """The finding that says what is wrong: the first one. Where that is about a member of a union,
    it is the first of the member whose type the value has; of several, of that one which reads
    most of the value."""
    first = errors[0]
    place = first["loc"]
    at = next((i for i in range(depth, _num_named(first)) if _is_member(place[i])), None)
    if at is None:
        return first
    members: dict[Any, list[Mapping[str, Any]]] = {}
    for error in errors:
        if error["loc"][:at] == place[:at] and len(error["loc"]) > at:
            members.setdefault(error["loc"][at], []).append(error)
    fitting = [
        found
        for found in members.values()
        if not any(_is_other_type(error, at + 1) for error in found)
    ]
    if fitting:
        furthest = max(fitting, key=lambda found: _how_far(found[0]["loc"][at + 1 :]))
        return _told(furthest, at + 1)
    kinds = " or ".join(dict.fromkeys(_MEMBERS.get(member, "a list") for member in members))
    return {**first, "loc": place[:at], "type": "union_type", "msg": f"expected {kinds}"}


def _how_far(place: Sequence[Any]) -> tuple[Any, ...]:
    """Sorts places by how much of a value stands in front of them, entries of lists by number."""
    return tuple(part if isinstance(part, int) else 0 for part in place)


def _validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """pydantic's findings as one 400: the one that says most, by the name of the field."""
    if not errors:
        return ApiError(400, "the request is not valid")
    first = _told(errors)
    place = first.get("loc", ())
    if first.get("type") == "json_invalid":
        about = first.get("ctx", {}).get("error", "")
        where = f"{about} at character {place[-1]}" if about and len(place) > 1 else "no JSON"
        return ApiError(400, f"the body is not valid JSON: {where}", code="invalid_json")
    if len(place) == 1 and isinstance(first.get("input"), bytes):  # it was not read as JSON
        return ApiError(
            400, "the request does not say that its body is JSON; send Content-Type: "
            "application/json", code="invalid_json",
        )  # fmt: skip
    if len(place) == 1:
        given = first.get("input")
        what = "is empty, or null" if given is None else f"is {show(given)}"
        return ApiError(400, f"the body {what}; send a JSON object", code="invalid_json")
    # "body", then the names of fields and, behind a union's, the member that was tried.
    known = _num_named(first)
    names = [part for part in place[1:known] if not _is_member(part)] + list(place[known:])
    param = ".".join(map(str, names))[:200] or None
    message = str(first.get("msg", "not valid"))
    if first.get("type") == "extra_forbidden":
        message = "there is no such field; remove it"
    elif first.get("type") == "missing":
        message = "this field is required"
    elif "input" in first:
        message = f"{message}, got {show(first['input'])}"
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def install_handlers(app: FastAPI) -> None:
    """Everything that can go wrong in `app` becomes an answer of this form."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        return error_response(api_error(error))

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error.errors()))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = str(error.detail)
        if isinstance(error.__cause__, UnicodeDecodeError):  # FastAPI could not read the body
            text = "the body is not valid UTF-8; send JSON in UTF-8"
        elif isinstance(error.__cause__, RecursionError):
            text = "the body is nested too deep; send a flatter one"
        elif isinstance(error.__cause__, ValueError):  # Python's limit
            text = "the body has an integer of too many digits; send a shorter one"
        if error.status_code in (404, 405):
            text = f"{request.method} {show(request.url.path)}: {text.lower()}"
        answer = error_response(ApiError(error.status_code, text))
        answer.headers.update(error.headers or {})
        return answer

    for kind in (ApiError, RequestError, EngineError):
        app.add_exception_handler(kind, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
