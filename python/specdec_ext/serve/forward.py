"""The application in front of replicas: passes requests on, and answers back as they come.

How a replica is called is a function; Ray's is in ray.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..log import logger
from .affinity import affinity_key
from .errors import ApiError, error_response
from .middleware import BodyLimit
from .settings import ServerSettings

__all__ = ["Answer", "CallReplica", "make_ingress", "replay"]


class Answer(Protocol):
    """The messages of a replica's application, as they come."""

    def __aiter__(self) -> AsyncIterator[Message]: ...

    def cancel(self) -> None:
        """Nobody reads any more."""


# (scope, body, affinity key) -> what the replica answers.
CallReplica = Callable[[Mapping[str, Any], bytes, str], Answer]

# What of a scope can cross to another process, and is needed there.
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
         "root_path", "headers", "client", "server")  # fmt: skip


def make_ingress(call: CallReplica, settings: ServerSettings) -> ASGIApp:
    """Bodies are held against the limits here, before they travel."""
    return BodyLimit(_Forward(call, settings.send_seconds), settings=settings)


class _Forward:
    def __init__(self, call: CallReplica, send_seconds: float) -> None:
        self._call = call
        self._send_seconds = send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: bytes = (await receive()).get("body", b"")
        plain = {name: scope[name] for name in SCOPE if name in scope}
        answer: Answer | None = None
        started: Message | None = None
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            answer = self._call(plain, body, affinity_key(plain, body))
            async for message in _until(gone, answer):
                if message["type"] == "http.response.start":
                    started = message
                await asyncio.wait_for(send(message), self._send_seconds)
        except asyncio.TimeoutError:
            pass  # a client that takes nothing is as good as gone
        except Exception as error:
            logger.warning("a replica failed: %s: %s", type(error).__name__, error)
            await _fail(error, started, scope, receive, send)
        finally:
            gone.cancel()
            if answer is not None:
                answer.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until(gone: asyncio.Future[None], answer: Answer) -> AsyncIterator[Message]:
    """The answer's messages, until the client goes."""
    iterator = answer.__aiter__()
    while True:
        step = asyncio.ensure_future(iterator.__anext__())
        await asyncio.wait((step, gone), return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
            return
        try:
            message = step.result()
        except StopAsyncIteration:
            return
        yield message


async def _fail(
    error: Exception, started: Message | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """One clear error for the client of a replica that has died."""
    failure = ApiError(503, "the replica that answered has stopped; send the request again")
    if started is None:
        await error_response(failure)(scope, receive, send)
        return
    kinds = [value for name, value in started["headers"] if name.lower() == b"content-type"]
    if not any(kind.startswith(b"text/event-stream") for kind in kinds):
        raise error  # a body that is cut short: the connection has to end without its end
    event = f"data: {json.dumps(failure.body())}\n\ndata: [DONE]\n\n".encode()
    await send({"type": "http.response.body", "body": event, "more_body": False})


async def replay(app: ASGIApp, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[Message]:
    """The replica's side: what `app` answers to the request. Closing the iterator is, for `app`,
    the client's going away."""
    # As much as one event ahead: an application that waits for a slow client waits here.
    messages: asyncio.Queue[Message | None] = asyncio.Queue(1)
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if request:
            return request.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        await app({**scope}, receive, messages.put)
        await messages.put(None)

    task = asyncio.ensure_future(run())
    try:
        while True:
            step = asyncio.ensure_future(messages.get())
            await asyncio.wait((step, task), return_when=asyncio.FIRST_COMPLETED)
            if not step.done():  # the application has failed
                step.cancel()
                task.result()
            message = await step
            if message is None:
                return
            yield message
    finally:
        gone.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
