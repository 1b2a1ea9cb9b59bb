"""From the event loop to the engine: admission, deadlines, cancelling, the end of a server.

The engine steps in a thread of its own (engine/background.py) and never waits for a client: it
marks that a request has news, and whoever serves the request takes what is new when it gets to it.
So tokens that are ready together are one event, and a slow client's tokens are not stored twice.
Reading a prompt (template, tokenizer) and submitting it happen in a few threads, off the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from ..engine.background import AsyncRequest
from ..llm import LLM
from ..log import logger
from ..request.sampling_params import SamplingParams
from ..text.outputs import RequestNews, RequestOutput
from ..text.prompts import PromptReader, TokenizedPrompt
from .errors import ApiError, draining, engine_failed, engine_stopped, timed_out
from .settings import ServerSettings

__all__ = ["Bridge", "PromptSource", "Running"]

# Reads one prompt; called in a thread.
PromptSource = Callable[[PromptReader], TokenizedPrompt]
READING_THREADS = 4
T = TypeVar("T")


class Running:
    """One prompt's request while it runs.

    Await result(), or next() for what is new (text/outputs.py), and close() it in the end. Both
    raise ApiError when the engine fails, the deadline passes or the
    server ends it.
    """

    def __init__(
        self,
        request: AsyncRequest,
        bridge: Bridge,
        seconds: float,
        request_id: str = "",
        form: str = "structured_outputs",
    ) -> None:
        self._request = request
        self._bridge = bridge
        self._request_id, self._form = request_id, form
        self._follower = request.follow()
        self._last: RequestOutput | None = None
        self._why: ApiError | None = None
        self._closed = False
        bridge.running.add(self)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self.end, timed_out(seconds))

    def end(self, why: ApiError) -> None:
        """Cancel the request; who waits for it gets `why`."""
        if self._why is None:
            self._why = why
        self._request.cancel()

    def close(self) -> None:
        """Nobody waits any more: cancels what still runs, counts what has ended. May be called
        twice."""
        if self._closed:
            return
        self._closed = True
        self._deadline.cancel()
        self._request.cancel()
        self._bridge.running.discard(self)
        if self._last is not None:
            self._bridge.on_finished(self._last)

    async def result(self) -> RequestOutput:
        """The whole answer."""
        try:
            return self._checked(await self._request)
        finally:
            self.close()

    async def next(self) -> RequestNews | RequestOutput:
        """What is new; the last is the whole output, which is `finished`."""
        found = await self._follower.next()
        return self._checked(found) if isinstance(found, RequestOutput) else found

    def _checked(self, last: RequestOutput) -> RequestOutput:
        """Its last output. Raises ApiError unless the request has ended by itself."""
        self._last = last
        reasons = {choice.finish_reason for choice in last.outputs}
        if "cancelled" in reasons:  # by end(), or because the engine was closed
            raise self._why or draining()
        if "error" in reasons:
            why = next(choice.error for choice in last.outputs if choice.finish_reason == "error")
            failure = engine_failed(why, self._form)
            level = logging.WARNING if failure.status < 500 else logging.ERROR
            words = " ".join((why or "").split())  # one line, whatever a client has put into it
            logger.log(level, "request %s failed: %s", self._request_id, words)
            raise failure
        return last


class Bridge:
    """One engine as the server's endpoints see it.

    on_finished  called with the last output of every request that the engine has ended
    """

    def __init__(
        self,
        llm: LLM,
        settings: ServerSettings,
        on_finished: Callable[[RequestOutput], None] = lambda output: None,
    ) -> None:
        self.llm = llm
        self.on_finished = on_finished
        self.running: set[Running] = set()
        self._seconds = settings.request_seconds
        self._drain_seconds = settings.drain_seconds
        self._threads: anyio.CapacityLimiter | None = None  # belongs to a loop
        self._lock = threading.Lock()
        self._reserved = 0  # requests that are read but not yet the engine's
        self._draining = False

    @property
    def is_serving(self) -> bool:
        """New requests are taken."""
        return not self._draining and self.is_alive

    @property
    def is_alive(self) -> bool:
        """The engine steps, or would if it had requests."""
        return self.llm.engine.is_open

    def refusal(self) -> ApiError:
        """Why new requests are not taken, for who asks while they are not."""
        return draining() if self._draining else engine_stopped()

    async def start(
        self,
        sources: Sequence[PromptSource],
        params: SamplingParams,
        *,
        request_id: str = "",
        form: str = "structured_outputs",
    ) -> list[Running]:
        """Submit one request per prompt, all or none.

        request_id  that the log has for them
        form        the field of the request that asks for its answer's form

        Raises RequestError (QueueFullError), ApiError.
        """
        if not self.is_serving:
            raise self.refusal()
        count = len(sources) * params.n
        most = self.llm.engine.limits.max_queued_requests
        if count > most:
            raise ApiError(
                400, f"{len(sources)} prompts with n = {params.n} are {count} outputs, more than "
                f"the {most} that the server holds; send fewer at once", param="n",
            )  # fmt: skip
        with self._lock:  # held for a sum; nothing in it waits
            self.llm.engine.require_room(count, self._reserved)
            self._reserved += count
        held = [count]
        try:
            requests = await self.in_thread(self._submit, sources, params, held)
        finally:
            self._release(held)
        return [Running(request, self, self._seconds, request_id, form) for request in requests]

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """The result of `work`, done in one of a few threads."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(READING_THREADS)
        return await anyio.to_thread.run_sync(work, *args, limiter=self._threads)

    def _release(self, held: list[int]) -> None:
        """Give back what was reserved; may be called twice."""
        with self._lock:
            self._reserved -= held.pop() if held else 0

    def _submit(
        self, sources: Sequence[PromptSource], params: SamplingParams, held: list[int]
    ) -> list[AsyncRequest]:
        prompts = [source(self.llm.prompts) for source in sources]
        # From here on the engine counts them, and refuses what is too many: nobody is counted
        # twice, so that nobody is refused while there is room.
        self._release(held)
        # One that is refused behind others leaves them without an owner, which cancels them.
        return [
            self.llm.generate_async({"prompt": text, "prompt_token_ids": ids}, params)
            for text, ids in prompts
        ]

    def drain(self) -> None:
        """Take no more requests; those that still run after drain_seconds end with an error."""
        if self._draining:
            return
        self._draining = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_seconds, self._end_all)

    def _end_all(self) -> None:
        for running in list(self.running):
            running.end(draining())
