"""Answers as server-sent events, and answers that end when their client goes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message, Send

from ..text.outputs import RequestOutput
from .bridge import Running
from .errors import api_error, client_gone

__all__ = ["DONE", "Chunks", "event", "event_stream", "merged", "unless_gone"]

T = TypeVar("T")
SEPARATOR = "\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode
DONE = ServerSentEvent("[DONE]", sep=SEPARATOR).encode()


def event(content: Any, name: str | None = None) -> bytes:
    """One event. ASCII, because some clients split lines where Unicode has a line end."""
    return ServerSentEvent(_encode(content), event=name, sep=SEPARATOR).encode()


class Chunks:
    """The events of a stream that differ in `choices` alone, which has one choice: what stands
    around it is written once.

    base  what else an event has
    """

    def __init__(self, base: Mapping[str, Any]) -> None:
        mark = _encode("choice")
        # The last thing in the event, so that no text of `base` is taken for the mark.
        whole = event({**base, "choices": ["choice"]})
        self._head, _, self._tail = whole.rpartition(mark.encode())

    def event(self, choice: Mapping[str, Any]) -> bytes:
        """The event with that choice."""
        return b"".join((self._head, _encode(choice).encode(), self._tail))


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
    events: AsyncIterator[bytes], running: Sequence[Running], send_seconds: float
) -> EventSourceResponse:
    """`events` to the client; when it goes, or takes none for `send_seconds`, its requests are
    cancelled. What fails meanwhile is the last event."""

    async def guarded() -> AsyncIterator[bytes]:
        try:
            async for item in events:
                yield item
        except Exception as error:
            yield event(api_error(error).body())
            yield DONE
        finally:
            for one in running:
                one.close()

    return _EventStream(guarded(), send_seconds)


async def merged(running: Sequence[Running]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """(number, snapshot) of several requests as they come."""
    if len(running) == 1:
        async for output in running[0]:
            yield 0, output
        return
    streams = [aiter(one) for one in running]
    waiting = {asyncio.ensure_future(anext(s)): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[number]))] = number
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
