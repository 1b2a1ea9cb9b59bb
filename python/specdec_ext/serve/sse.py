"""Answers as server-sent events, and answers that end when their client goes.

Every stream goes the same way: an endpoint's EventWriter makes bytes of what is new in the request,
and one generator hands them to the library's response.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message, Send

from ..engine.background import behind_others
from ..text.outputs import RequestNews, RequestOutput
from .bridge import Running
from .errors import ApiError, api_error, client_gone

__all__ = ["DONE", "HOLE", "EventWriter", "Template", "event", "event_stream", "unless_gone"]

T = TypeVar("T")
SEPARATOR = "\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode
DONE = ServerSentEvent("[DONE]", sep=SEPARATOR).encode()
# Stands for a value that a Template is given later; no text of a request can be the same.
HOLE = f"hole-{secrets.token_hex(16)}"


def _json(value: Any) -> str:
    # Token ids, mostly a single one, need no encoder: the library makes one for every list.
    if type(value) is list and set(map(type, value)) == {int}:
        return f"[{','.join(map(str, value))}]"
    return _encode(value)


def event(content: Any, name: str | None = None) -> bytes:
    """One event. ASCII, because some clients split lines where Unicode has a line end."""
    return ServerSentEvent(_encode(content), event=name, sep=SEPARATOR).encode()


class Template:
    """Events that differ in a few values alone: what stands around those is written once.

    content, name  of the event, with HOLE for each of these values
    """

    def __init__(self, content: Mapping[str, Any], name: str | None = None) -> None:
        whole = event(content, name).decode()
        self._format = whole.replace("%", "%%").replace(_encode(HOLE), "%s")

    def event(self, *values: Any) -> bytes:
        """The event with those values, in the order of their holes."""
        return (self._format % tuple([_json(value) for value in values])).encode()


class EventWriter:
    """What an endpoint makes of a stream's news: the bytes of whole events, b"" for none."""

    def begin(self) -> bytes:
        """What comes in front of any token."""
        return b""

    def news(self, number: int, output: RequestNews | RequestOutput) -> bytes:
        """What is new in prompt `number` of the request; the last of each is its whole output."""
        raise NotImplementedError

    def end(self) -> bytes:
        """What comes behind the last news of the last prompt."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that has failed."""
        return event(error.body()) + DONE


class _EventStream(EventSourceResponse):
    """The library's, which makes a timer for every event; here one watches the whole stream."""

    def __init__(self, events: AsyncIterator[bytes], send_seconds: float) -> None:
        super().__init__(
            events, sep=SEPARATOR, send_timeout=send_seconds, data_sender_callable=self._watch
        )
        self._seconds = send_seconds
        self._began: float | None = None  # to send what the client has not taken yet

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        self._began = time.monotonic()
        await send(message)
        self._began = None

    async def _watch(self) -> None:
        """Raises SendTimeoutError, which ends the stream, once the client is too late."""
        while True:
            left = self._seconds
            if self._began is not None:
                left += self._began - time.monotonic()
            if left <= 0:
                raise SendTimeoutError
            await asyncio.sleep(left)


def event_stream(
    writer: EventWriter, running: Sequence[Running], send_seconds: float
) -> EventSourceResponse:
    """The events of `running` to the client; when it goes, or takes none for `send_seconds`, its
    requests are cancelled. What fails meanwhile is the last event."""
    return _EventStream(_events(writer, running), send_seconds)


async def _events(writer: EventWriter, running: Sequence[Running]) -> AsyncIterator[bytes]:
    """The end comes behind what a step brings to other streams: the last token is with the client
    by then, and what is left to do can wait."""
    try:
        if content := writer.begin():
            yield content
        if len(running) == 1:
            one, finished = running[0], False
            while not finished:
                output = await one.next()
                finished = output.finished
                if content := writer.news(0, output):
                    yield content
        else:
            async for number, output in _merged(running):
                if content := writer.news(number, output):
                    yield content
        await behind_others()
        _close(running)
        yield writer.end()
    except Exception as error:
        yield writer.failed(api_error(error))
    finally:
        _close(running)


def _close(running: Sequence[Running]) -> None:
    for one in running:
        one.close()


async def _merged(
    running: Sequence[Running],
) -> AsyncIterator[tuple[int, RequestNews | RequestOutput]]:
    """(number, news) of several requests as they come."""
    waiting = {asyncio.ensure_future(one.next()): i for i, one in enumerate(running)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number, output = waiting.pop(task), task.result()
                if not output.finished:
                    waiting[asyncio.ensure_future(running[number].next())] = number
                yield number, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises ApiError (499) when the client closes the connection before that;
    `work` is cancelled then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise client_gone()
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
