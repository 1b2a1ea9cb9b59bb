"""Asynchronous requests: a background thread steps the engine while asyncio code waits.

The thread starts with the first asynchronous request and ends when none is left, so an idle LLM
owns no thread. A request whose consumer goes away (cancelled task, closed iterator, dropped
object) is cancelled.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any

from ..log import logger
from ..request.resolve import ResolvedRequest
from ..text.outputs import RequestOutput
from .loop import EngineLoop
from .request_group import RequestGroup
from .request_state import RequestState

if TYPE_CHECKING:
    import asyncio

__all__ = ["AsyncRequest", "BackgroundStepper"]


class BackgroundStepper:
    """Steps an engine while asynchronous requests are unfinished."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._states: set[RequestState] = set()
        self._thread: threading.Thread | None = None

    def watch(self, state: RequestState) -> None:
        """Keep stepping until `state` has ended."""
        with self._lock:
            self._states.add(state)
            if self._thread is None or not self._thread.is_alive():
                # A daemon, or an idle wait in it would keep the process; the engine is closed at
                # exit, which ends the thread.
                self._thread = threading.Thread(
                    target=self._run, name="specdec-engine", daemon=True
                )
                self._thread.start()

    def join(self) -> None:
        """Wait for the thread; every watched request must have ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._states = {s for s in self._states if not s.finished}
                if not self._states:
                    self._thread = None
                    return
                states = list(self._states)
            try:
                if not self._engine.step():
                    self._engine.run(states)  # words the error for requests that cannot continue
            except BaseException as error:
                logger.error("engine thread: %s", error, exc_info=error)
                for state in states:
                    self._engine.cancel(state)
                    state.end("error", error=f"engine thread: {error}")
                    state.notify()


class _Wakes:
    """Wakes who waits in one event loop. What a step brings wakes the loop once: every call into
    it from another thread is a system call, and has both threads want the interpreter."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # which is the key under which this is kept
        self._waiting: deque[asyncio.Event] = deque()
        self._is_called = False

    def set(self, event: asyncio.Event) -> None:
        """Set `event` in its loop; may be called by any thread."""
        self._waiting.append(event)  # before the look: who has looked before takes it along
        loop = self._loop()
        if self._is_called or loop is None:
            return
        self._is_called = True
        try:
            loop.call_soon_threadsafe(self._set_all)
        except RuntimeError:  # the loop is closed
            self._is_called = False

    def _set_all(self) -> None:
        self._is_called = False
        while self._waiting:
            self._waiting.popleft().set()


_wakes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakes] = weakref.WeakKeyDictionary()


def _wakes_of(loop: asyncio.AbstractEventLoop) -> _Wakes:
    """Called in the loop alone."""
    found = _wakes.get(loop)
    if found is None:
        found = _wakes[loop] = _Wakes(loop)
    return found


class AsyncRequest:
    """A running request: await it for the final RequestOutput, or iterate over snapshots.

    Snapshots are cumulative; their delta fields hold what is new. A slow consumer gets fewer,
    larger ones: nothing is buffered. One consumer at a time. Failure at run time is
    finish_reason "error" in the output; what is invalid was refused by generate_async().
    """

    def __init__(
        self,
        engine: EngineLoop,
        stepper: BackgroundStepper,
        request: ResolvedRequest,
        prompt: str | None,
    ) -> None:
        self._wake: tuple[_Wakes, asyncio.Event] | None = None
        self._group = RequestGroup(engine, request, prompt=prompt, on_update=self._make_callback())
        for state in self._group.states:
            stepper.watch(state)

    def _make_callback(self) -> Any:
        # The state must not keep this object alive: dropping it is how a client goes away.
        ref = weakref.ref(self)

        def on_update(_: RequestState) -> None:
            request = ref()
            wake = request._wake if request is not None else None
            if wake is not None:
                wakes, event = wake
                wakes.set(event)

        return on_update

    @property
    def request_id(self) -> str:
        return self._group.request_id

    @property
    def finished(self) -> bool:
        return self._group.finished

    def cancel(self) -> bool:
        """End the request with finish_reason "cancelled"; False if it had ended."""
        return self._group.cancel()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._final().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._snapshots()

    async def _final(self) -> RequestOutput:
        while True:
            version = self._group.version
            if self._group.finished:
                return self._group.snapshot()
            await self._changed(version)

    async def _snapshots(self) -> AsyncIterator[RequestOutput]:
        try:
            while True:
                version = self._group.version
                if not self._group.has_news:
                    await self._changed(version)
                    continue
                output = self._group.snapshot()
                if output.finished or any(out.delta_token_ids for out in output.outputs):
                    yield output
                if output.finished:
                    return
        finally:
            self.cancel()

    async def _changed(self, version: int) -> None:
        """Wait until the request is past `version`."""
        import asyncio  # a tenth of the start of a process that never waits

        event = asyncio.Event()
        self._wake = (_wakes_of(asyncio.get_running_loop()), event)
        if self._group.version != version:  # it changed before the event was in place
            return
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
