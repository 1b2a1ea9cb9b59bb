"""What every request passes: its id and log line, the size of its body, its key."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, api_error, error_response
from .keys import ApiKeys
from .settings import ServerSettings

__all__ = ["AccessLog", "BodyLimit", "KeyCheck", "access_logger"]

access_logger = logging.getLogger("specdec_ext.access")

# Who asks whether the server is there has no key; the page asks its user for one.
OPEN_PATHS = ("/health", "/ready", "/")
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class AccessLog:
    """Gives every request an id, and writes one line of JSON when it has been answered.

    No prompt and no answer is in it: an endpoint puts what may be known (counts, the reason of the
    end) into scope["state"]["log"].
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else secrets.token_hex(16)
        entry: dict[str, Any] = {}
        state = scope.setdefault("state", {})
        state["request_id"], state["log"] = request_id, entry
        start, status, sent = time.perf_counter(), 0, 0

        async def sending(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if status:  # the answer has begun; the connection ends
                raise
            await error_response(api_error(error))(scope, receive, sending)
        finally:
            client = scope.get("client")
            line = {
                "time": time.time(),
                "request_id": request_id,
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or 499,
                "seconds": time.perf_counter() - start,
                "bytes": sent,
                **entry,
            }
            access_logger.info("%s", json.dumps(line))


class BodyLimit:
    """Refuses a body that is too long, or too long on its way.

    Starlette's own limit knows no time and answers in plain text, in front of keys and log.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._most = settings.max_body_bytes
        self._seconds = settings.body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 18 or int(declared) > self._most:
            await error_response(self._too_long(declared))(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._body(receive), self._seconds)
        except asyncio.TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self._seconds:g} s")
            await error_response(error)(scope, receive, send)
            return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replayed, send)

    async def _body(self, receive: Receive) -> bytes:
        """The whole body; what there is of it if the client goes. Raises ApiError."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_long("more")
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_long(self, size: str) -> ApiError:
        return ApiError(
            413, f"the body has {size[:20]} bytes, limit {self._most}; send a shorter one"
        )


class KeyCheck:
    """Lets only the owners of keys through; scope["state"]["tenant"] is the number of the key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = self._keys.tenant(Headers(scope=scope).get("authorization"))
            state = scope.setdefault("state", {})
            state["tenant"] = state["log"]["tenant"] = tenant
            if tenant is None and scope["path"] not in OPEN_PATHS:
                error = ApiError(
                    401, "the request has none of the server's keys; send Authorization: Bearer KEY"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
