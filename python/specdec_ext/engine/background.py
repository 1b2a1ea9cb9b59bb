"""Asynchronous requests: a background thread steps the engine while asyncio code waits.

The thread starts with the first asynchronous request and ends when none is left, so an idle LLM
owns no thread. A request whose consumer goes away (cancelled task, closed iterator, dropped
object) is cancelled.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..log import logger
from ..request.resolve import ResolvedRequest
from ..text.outputs import RequestNews, RequestOutput
from .loop import EngineLoop
from .request_group import RequestGroup
from .request_state import RequestState

if TYPE_CHECKING:
    import asyncio

__all__ = ["AsyncRequest", "BackgroundStepper", "Follower", "behind_others"]

Look = TypeVar("Look", bound=RequestNews | RequestOutput)


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
                    self._fail(state, f"engine thread: {error}")

    def _fail(self, state: RequestState, message: str) -> None:
        """End a request with an error, whatever else fails: the thread has others."""
        try:
            state.end("error", error=message)
            self._engine.cancel(state)
        except Exception as error:
            logger.error("request %s: %s", state.request_id, error, exc_info=error)
        state.notify()


class _Wakes:
    """Wakes who waits in one event loop, in the order in which they were told to.

    What a step brings wakes the loop once: every call into it from another thread is a system call,
    and has both threads want the interpreter. The loop then wakes a few in each of its turns: what
    they write may leave at the end of a turn (uvloop), and need not wait for all the others.
    """

    PER_TURN = 8

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # which is the key under which this is kept
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_called = False

    def new(self) -> asyncio.Future[None]:
        """For set(): who awaits it is woken then. Called in the loop alone."""
        loop = self._loop()
        assert loop is not None
        return loop.create_future()

    def set(self, waiter: asyncio.Future[None]) -> None:
        """Wake who waits for `waiter`; may be called by any thread."""
        self._waiting.append(waiter)  # before the look: who has looked before takes it along
        loop = self._loop()
        if self._is_called or loop is None:
            return
        self._is_called = True
        try:
            loop.call_soon_threadsafe(self._set_some)
        except RuntimeError:  # the loop is closed
            self._is_called = False

    async def behind_others(self) -> None:
        """Wait until all waiters that were due when this was called have been woken."""
        waiter = self.new()
        self.set(waiter)
        await waiter

    def _set_some(self) -> None:
        self._is_called = False
        for _ in range(min(len(self._waiting), self.PER_TURN)):
            waiter = self._waiting.popleft()
            if not waiter.done():  # told twice, or cancelled
                waiter.set_result(None)
        loop = self._loop()
        if self._waiting and not self._is_called and loop is not None:
            self._is_called = True
            loop.call_soon(self._set_some)


_wakes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakes] = weakref.WeakKeyDictionary()


def _wakes_here() -> _Wakes:
    """The _Wakes of the running loop."""
    import asyncio  # a tenth of the start of a process that never waits

    loop = asyncio.get_running_loop()
    found = _wakes.get(loop)
    if found is None:
        found = _wakes[loop] = _Wakes(loop)
    return found


async def behind_others() -> None:
    """Let the waiters of this event loop for whom a step has news go first.

    For work at the end of a request for which no client waits.
    """
    await _wakes_here().behind_others()


class AsyncRequest:
    """A running request: await it for the final RequestOutput, or iterate over snapshots.

    Snapshots are cumulative; their delta fields hold what is new. Nothing is buffered: a slow
    consumer gets fewer, larger snapshots. Use one consumer at a time. A request that fails while it
    runs has finish_reason "error"; generate_async() has refused invalid ones.
    """

    def __init__(
        self,
        engine: EngineLoop,
        stepper: BackgroundStepper,
        request: ResolvedRequest,
        prompt: str | None,
    ) -> None:
        self._wake: tuple[_Wakes, asyncio.Future[None]] | None = None
        self._group = RequestGroup(engine, request, prompt=prompt, on_update=self._make_callback())
        for state in self._group.states:
            stepper.watch(state)

    def _make_callback(self) -> Any:
        # The state must not keep this object alive: a client cancels by dropping it.
        ref = weakref.ref(self)

        def on_update(_: RequestState) -> None:
            request = ref()
            wake = request._wake if request is not None else None
            if wake is not None:
                wakes, waiter = wake
                wakes.set(waiter)

        return on_update

    @property
    def request_id(self) -> str:
        return self._group.request_id

    @property
    def finished(self) -> bool:
        return self._group.finished

    def follow(self) -> Follower[RequestNews | RequestOutput]:
        """What is new, each time that there is something."""
        return Follower(self, self._group.news)

    def cancel(self) -> bool:
        """End the request with finish_reason "cancelled"; return False if it had already ended."""
        return self._group.cancel()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._final().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._snapshots()

    async def _final(self) -> RequestOutput:
        wakes, group = _wakes_here(), self._group
        while True:
            seen = group.version
            if group.finished:
                return group.snapshot()
            await self._changed(seen, wakes)

    async def _snapshots(self) -> AsyncIterator[RequestOutput]:
        follower = Follower(self, self._group.snapshot)
        try:
            while True:
                output = await follower.next()
                yield output
                if output.finished:
                    return
        finally:
            self.cancel()

    async def _changed(self, seen: int, wakes: _Wakes) -> None:
        """Wait until the request is past version `seen`."""
        waiter = wakes.new()
        self._wake = (wakes, waiter)
        try:
            if self._group.version == seen:  # and has not changed before the waiter was in place
                await waiter
        except BaseException:  # the caller no longer waits
            self.cancel()
            raise
        finally:
            self._wake = None


class Follower(Generic[Look]):
    """Looks at a request again and again, each time that something is new, without a generator.

    A caller that stops before the last look must cancel the request.

    look  RequestGroup.snapshot or .news
    """

    def __init__(self, request: AsyncRequest, look: Callable[[], Look]) -> None:
        self._request = request
        self._look = look
        self._wakes = _wakes_here()
        self._seen = 0

    async def next(self) -> Look:
        """The next one, which has something new or is the last."""
        request = self._request
        while True:
            await request._changed(self._seen, self._wakes)
            self._seen = request._group.version  # what comes later is in the next look, if not here
            found = self._look()
            if found.finished:
                return found
            for one in found.outputs:  # a generator would take more calls
                if one.delta_token_ids or one.delta_steps:
                    return found
