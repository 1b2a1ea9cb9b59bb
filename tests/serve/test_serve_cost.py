"""What an event costs the server's thread, against the least that its libraries take: the same
bytes to as many clients by a bare application, which has no engine behind it."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import LiveServer, make_app, make_llm
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

STREAMS, EVENTS, ROUNDS = 32, 70, 3
FIRST, LAST = 20, 60  # events between which it is measured
STEP_SECONDS = 0.02  # time enough for all clients to get theirs: one event per step
MOST = 2.5

# Reads all streams to their ends, and does nothing with them.
CLIENT = """
import asyncio, sys
port, path, body, count = int(sys.argv[1]), sys.argv[2], sys.argv[3].encode(), int(sys.argv[4])
head = (f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n"
        f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n").encode()
async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + body)
    size = 0
    while data := await reader.read(65536):
        size += data.count(b"data: {")
    writer.close()
    return size
async def main():
    print(sum(await asyncio.gather(*(one() for _ in range(count)))))
asyncio.run(main())
"""


class Meter:
    """Reads a server thread's processor time at two steps."""

    def __init__(self, server: LiveServer) -> None:
        assert server.thread.ident is not None
        self._clock = time.pthread_getcpuclockid(server.thread.ident)
        self.marks: dict[int, float] = {}

    def step(self, number: int) -> None:
        if number in (FIRST, LAST):
            self.marks[number] = time.clock_gettime(self._clock)

    @property
    def seconds_per_event(self) -> float:
        return (self.marks[LAST] - self.marks[FIRST]) / ((LAST - FIRST) * STREAMS)


def read_all(port: int, path: str, body: str) -> int:
    command = [sys.executable, "-c", CLIENT, str(port), path, body, str(STREAMS)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


@contextmanager
def ours(path: Path) -> Iterator[Any]:
    """A call that serves all streams once and returns seconds per event."""
    with make_llm(path, max_batch_size=STREAMS) as llm, LiveServer(make_app(llm)) as server:
        model: Any = llm.engine.model
        forward, count = model.forward, 0
        meter = Meter(server)

        def slowly(*given: Any) -> Any:
            nonlocal count
            count += 1
            # Prompts come first, in any number of steps; from then on all streams are there.
            if llm.get_metrics()["executor"]["running"] < STREAMS:
                count = 0
            meter.step(count)
            time.sleep(STEP_SECONDS)
            return forward(*given)

        model.forward = slowly
        body = (
            f'{{"prompt": "tell me", "max_tokens": {EVENTS}, "stream": true, "ignore_eos": true,'
            ' "speculative_config": false}'
        )

        def run() -> float:
            meter.marks.clear()
            assert read_all(server.port, "/v1/completions", body) >= (LAST - FIRST) * STREAMS
            return meter.seconds_per_event

        yield run


@contextmanager
def bare() -> Iterator[Any]:
    """The same of an application that has nothing to do but to send."""
    text = (
        '{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1,'
        '"model":"tiny","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}'
    )
    waiting: set[asyncio.Event] = set()
    loops: list[asyncio.AbstractEventLoop] = []

    async def events() -> AsyncIterator[ServerSentEvent]:
        loops[:] = [asyncio.get_running_loop()]
        tick = asyncio.Event()
        waiting.add(tick)
        for _ in range(EVENTS):
            await tick.wait()
            tick.clear()
            yield ServerSentEvent(text, sep="\n")
        waiting.discard(tick)

    async def stream(request: Request) -> EventSourceResponse:
        await request.body()
        return EventSourceResponse(events(), sep="\n", send_timeout=30)

    def tick_all() -> None:
        for tick in waiting:
            tick.set()

    app: Any = Starlette(routes=[Route("/stream", stream, methods=["POST"])])
    app.state.serving = SimpleNamespace(
        settings=SimpleNamespace(drain_seconds=1.0), bridge=SimpleNamespace(drain=lambda: None)
    )
    with LiveServer(app) as server:
        meter = Meter(server)

        def steps() -> None:
            while len(waiting) < STREAMS:
                time.sleep(STEP_SECONDS)
            for number in range(EVENTS):
                meter.step(number)
                loops[0].call_soon_threadsafe(tick_all)
                time.sleep(STEP_SECONDS)
            while waiting:  # who was slow gets the rest
                loops[0].call_soon_threadsafe(tick_all)
                time.sleep(STEP_SECONDS)

        def run() -> float:
            meter.marks.clear()
            thread = threading.Thread(target=steps)
            thread.start()
            assert read_all(server.port, "/stream", "{}") == EVENTS * STREAMS
            thread.join()
            return meter.seconds_per_event

        yield run


@pytest.mark.slow
def test_an_event_costs_little_more_than_sending_it(tiny_path: Path) -> None:
    with ours(tiny_path) as first, bare() as second:
        pairs = [(first(), second()) for _ in range(ROUNDS)]
    shown = [(round(1e6 * a, 1), round(1e6 * b, 1)) for a, b in pairs]
    print("us per event, bare:", shown)
    assert statistics.median(a / b for a, b in pairs) <= MOST, shown
