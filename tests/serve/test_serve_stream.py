"""What a stream's events are made of, what one costs in calls, and clients that take none."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from raw_client import ask
from servers import LiveServer, make_app, make_llm, wait_until
from sse_starlette.sse import SendTimeoutError

from specdec_ext import LLM, SamplingParams
from specdec_ext.engine.background import _wakes_here
from specdec_ext.serve.bridge import Running
from specdec_ext.serve.interpreter import SWITCH_SECONDS
from specdec_ext.serve.sse import Chunks, event, event_stream

BASES: list[dict[str, Any]] = [
    {"id": "x", "model": "m"},
    {"id": '"choice"', "model": '["choice"]', "usage": None},
    {"id": "\u2028\n", "usage": {"prompt_tokens": 3}},
]
CHOICES: list[dict[str, Any]] = [
    {"index": 0, "text": "a\nb\u2028\ud800", "logprobs": None},
    {"index": 1, "delta": {"content": '"choice"'}, "finish_reason": "stop"},
]


@pytest.mark.parametrize("base", BASES)
def test_a_chunk_is_an_event_whose_choice_is_filled_in(base: dict[str, Any]) -> None:
    chunks = Chunks(base)
    for choice in CHOICES:
        assert chunks.event(choice) == event({**base, "choices": [choice]})


class Client:
    """The far side of an application: takes so many events at once, each later one when told."""

    def __init__(self, at_once: int) -> None:
        self.taken: list[bytes] = []
        self._free = asyncio.Semaphore(at_once + 1)  # the beginning of the answer is one

    def take(self) -> None:
        self._free.release()

    async def send(self, message: Any) -> None:
        await self._free.acquire()
        self.taken.append(message.get("body", b""))

    async def receive(self) -> Any:
        await asyncio.Event().wait()


async def three() -> AsyncIterator[bytes]:
    for number in range(3):
        yield event(number)


class Closed:
    """Stands for a running request."""

    count = 0

    def close(self) -> None:
        self.count += 1


SCOPE = {"type": "http", "method": "POST"}


def test_a_client_that_takes_no_event_is_disconnected() -> None:
    async def main() -> None:
        running: Any = Closed()
        client = Client(at_once=1)
        stream = event_stream(three(), [running], 0.05)
        with pytest.raises(SendTimeoutError):
            await stream(SCOPE, client.receive, client.send)
        assert client.taken == [b"", event(0)] and running.count == 1

    asyncio.run(main())


def test_a_slow_client_has_its_time_for_every_event() -> None:
    """All events together take longer than each may."""

    async def main() -> None:
        running: Any = Closed()
        client = Client(at_once=0)
        stream = event_stream(three(), [running], 0.4)
        answer = asyncio.ensure_future(stream(SCOPE, client.receive, client.send))
        for _ in range(4):
            await asyncio.sleep(0.15)
            client.take()
        await answer
        assert client.taken == [b"", event(0), event(1), event(2), b""] and running.count == 1

    asyncio.run(main())


def test_a_stream_without_news_is_no_slow_client() -> None:
    async def main() -> None:
        running: Any = Closed()
        client = Client(at_once=9)

        async def rarely() -> AsyncIterator[bytes]:
            async for item in three():
                yield item
                await asyncio.sleep(0.25)

        stream = event_stream(rarely(), [running], 0.1)
        await stream(SCOPE, client.receive, client.send)
        assert client.taken == [b"", event(0), event(1), event(2), b""]

    asyncio.run(main())


def test_what_ends_a_request_comes_behind_other_streams(llm: LLM) -> None:
    """Its last event has been sent, and others of its step have theirs, before it is counted."""
    seen: list[str] = []
    bridge = make_app(llm).state.serving.bridge
    bridge.on_finished = lambda output: seen.append("counted")

    async def main() -> None:
        request = llm.generate_async("abc", SamplingParams(max_tokens=2, ignore_eos=True))
        async for output in Running(request, bridge, 60.0):
            if output.finished:
                seen.append("sent")
                wakes = _wakes_here()
                other = wakes.new()
                other.add_done_callback(lambda _: seen.append("other"))
                wakes.set(other)

    asyncio.run(main())
    assert seen == ["sent", "other", "counted"]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_interpreter_is_as_before_when_the_last_server_has_ended(
    llm: LLM, frozen: bool
) -> None:
    before = sys.getswitchinterval()
    gc.unfreeze()
    if frozen:
        gc.freeze()
    with LiveServer(make_app(llm)):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        assert gc.get_freeze_count() > 1000
        with LiveServer(make_app(llm)):
            pass
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == pytest.approx(before)
    assert (gc.get_freeze_count() > 0) == frozen
    gc.freeze()  # as tests/conftest.py has left it


# -- what an event costs --------------------------------------------------------------------------

STREAMS, TOKENS = 12, 60
FIRST, LAST = 10, 50  # passes between which it is counted
STEP_SECONDS = 0.005  # for the loop to send what a step brought; less only makes fewer events
MOST_CALLS = 145


class Calls:
    """The calls that a server's event loop makes in its thread between begin() and end()."""

    def __init__(self, server: LiveServer) -> None:
        self._loop: Any = server.server.servers[0].get_loop()
        self.names: Counter[str] = Counter()

    def begin(self) -> None:
        self._set(self._note)

    def end(self) -> None:
        self._set(None)

    def _note(self, frame: FrameType, kind: str, argument: Any) -> None:
        if kind == "call":
            self.names[frame.f_code.co_name] += 1
        elif kind == "c_call":
            self.names[argument.__name__] += 1

    def _set(self, profile: Any) -> None:
        done = threading.Event()

        def change() -> None:
            sys.setprofile(profile)
            done.set()

        self._loop.call_soon_threadsafe(change)
        done.wait()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_event_takes_few_calls(tiny_path: Path, path: str) -> None:
    """A count that no machine's speed and no neighbour changes; test_serve_cost.py has times."""
    body: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "stream": True,
                            "ignore_eos": True, "speculative_config": False}  # fmt: skip
    if path == "/v1/completions":
        body["prompt"] = "tell me"
    else:
        body["messages"] = [{"role": "user", "content": "tell me"}]
    with make_llm(tiny_path, max_batch_size=STREAMS) as llm, LiveServer(make_app(llm)) as live:
        model: Any = llm.engine.model
        forward, calls, passes = model.forward, Calls(live), 0

        def counted(*given: Any) -> Any:
            nonlocal passes
            wait_until(lambda: passes > 0 or llm.engine.num_unfinished == STREAMS)
            passes += 1
            if passes == FIRST:
                calls.begin()
            elif passes == LAST:
                calls.end()
            time.sleep(STEP_SECONDS)
            return forward(*given)

        model.forward = counted

        async def main() -> None:
            answers = await asyncio.gather(*(ask(live.port, path, body) for _ in range(STREAMS)))
            assert {status for status, _ in answers} == {200}

        asyncio.run(main())
    events = calls.names["_choice"]  # made once for each
    assert events > STREAMS * 3
    per_event = calls.names.total() / events
    assert per_event <= MOST_CALLS, calls.names.most_common(40)
