"""What a stream's events are made of, what one costs in calls, and clients that take none."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from raw_client import ask
from servers import LiveServer, make_app, make_llm, wait_until
from sse_reader import chunks, events
from sse_starlette.sse import SendTimeoutError

from specdec_ext import LLM, SamplingParams
from specdec_ext.engine.background import _wakes_here
from specdec_ext.serve.bridge import Running
from specdec_ext.serve.errors import ApiError
from specdec_ext.serve.interpreter import COLLECTIONS, SWITCH_SECONDS
from specdec_ext.serve.routes import chat, completions
from specdec_ext.serve.schema.chat import ChatRequest, Message
from specdec_ext.serve.schema.completions import CompletionRequest
from specdec_ext.serve.sse import DONE, HOLE, EventWriter, Template, event, event_stream
from specdec_ext.text.outputs import (
    CompletionNews,
    CompletionOutput,
    Logprob,
    RequestNews,
    RequestOutput,
)

BASES: list[dict[str, Any]] = [
    {"id": "x", "model": "m"},
    {"id": '"choice"', "model": '["choice"]', "usage": None},
    {"id": "\u2028\n%s%%", "usage": {"prompt_tokens": 3}},
]
CHOICES: list[dict[str, Any]] = [
    {"index": 0, "text": "a\nb\u2028\ud800", "logprobs": None},
    {"index": 1, "delta": {"content": '"choice"'}, "finish_reason": "stop"},
]


@pytest.mark.parametrize("base", BASES)
def test_a_template_is_an_event_whose_holes_are_filled_in(base: dict[str, Any]) -> None:
    template = Template({"n": HOLE, **base, "choices": [HOLE], "x": {"y": HOLE}}, "na%me")
    for number, choice in enumerate(CHOICES):
        made = template.event(number, choice, "100%s\n")
        want = {"n": number, **base, "choices": [choice], "x": {"y": "100%s\n"}}
        assert made == event(want, "na%me")


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


class Numbers(EventWriter):
    """Events 0, 1 and 2; the last one ends the stream."""

    def begin(self) -> bytes:
        return event(0)

    def news(self, number: int, output: Any) -> bytes:
        return event(output.value) if output.value else b""

    def end(self) -> bytes:
        return event("end")


class Three:
    """Stands for a running request with three snapshots, of which the first is worth no event."""

    def __init__(self, wait: float = 0.0, failure: Exception | None = None) -> None:
        self.closed = self._taken = 0
        self._wait, self._failure = wait, failure

    async def next(self) -> Any:
        assert not self.closed
        await asyncio.sleep(self._wait)
        value, self._taken = self._taken, self._taken + 1
        if self._failure is not None and value == 2:
            raise self._failure
        return SimpleNamespace(value=value, finished=value == 2)

    def close(self) -> None:
        self.closed += 1


SCOPE = {"type": "http", "method": "POST"}
WHOLE = [b"", event(0), event(1), event(2), event("end"), b""]


def test_a_client_that_takes_no_event_is_disconnected() -> None:
    async def main() -> None:
        running: Any = Three()
        client = Client(at_once=1)
        stream = event_stream(Numbers(), [running], 0.05)
        with pytest.raises(SendTimeoutError):
            await stream(SCOPE, client.receive, client.send)
        assert client.taken == [b"", event(0)] and running.closed

    asyncio.run(main())


def test_a_slow_client_has_its_time_for_every_event() -> None:
    """All events together take longer than each may."""

    async def main() -> None:
        running: Any = Three()
        client = Client(at_once=0)
        stream = event_stream(Numbers(), [running], 0.4)
        answer = asyncio.ensure_future(stream(SCOPE, client.receive, client.send))
        for _ in range(5):
            await asyncio.sleep(0.15)
            client.take()
        await answer
        assert client.taken == WHOLE and running.closed

    asyncio.run(main())


def test_a_stream_without_news_is_no_slow_client() -> None:
    async def main() -> None:
        running: Any = Three(wait=0.25)
        client = Client(at_once=9)
        stream = event_stream(Numbers(), [running], 0.1)
        await stream(SCOPE, client.receive, client.send)
        assert client.taken == WHOLE

    asyncio.run(main())


def test_what_fails_is_the_last_event() -> None:
    """The others of several requests are closed then; what an error says stays inside."""

    async def main() -> None:
        for failure, code in (
            (ApiError(504, "late"), "timeout"),
            (ValueError("words of the inside"), "internal_error"),
        ):
            running: list[Any] = [Three(), Three(failure=failure), Three(wait=60.0)]
            client = Client(at_once=9)
            await event_stream(Numbers(), running, 9.0)(SCOPE, client.receive, client.send)
            *_, failed, end = client.taken
            [(_, data), (_, done)] = events(failed.decode())
            assert (done, end) == ("[DONE]", b"")
            assert json.loads(data)["error"]["code"] == code and "inside" not in data
            assert all(one.closed for one in running)

    asyncio.run(main())


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_plain_events_are_as_any(client: Any, path: str, ids: bool) -> None:
    """They are filled into templates of their own; the bytes are those of the general way."""
    request: Any = SimpleNamespace(app=client.app, state=SimpleNamespace(log={}))
    more: dict[str, Any] = {"n": 2, "stream": True, "return_token_ids": ids}
    answer: Any
    if path == "/v1/completions":
        body = CompletionRequest(prompt=["a", "b"], **more)
        answer = completions._Answer(request, body, "tiny", 2)
    else:
        messages = [Message(role="user", content="a")]
        answer = chat._Answer(request, ChatRequest(messages=messages, **more), "tiny", None)
    answer.begin()
    news: list[RequestNews] = []
    for texts in (["x", "y"], ["a%s\u2028", "\n\ud83d"]):  # the first tells the prompt's ids
        outputs: Any = [CompletionNews(i, 2, t, [7, 8], [(t, None)], [], None)
                        for i, t in enumerate(texts)]  # fmt: skip
        news.append(RequestNews("ab", [1, 2], outputs, 0, None))
    assert len(answer._plain) == (4 if path == "/v1/completions" else 2)
    answer.news(1, news[0])
    short = answer.news(1, news[1])
    answer._plain = []
    assert answer.news(1, news[1]) == short
    found = [json.loads(data)["choices"][0] for _, data in events(short.decode())]
    first = 2 if path == "/v1/completions" else 0
    assert [choice["index"] for choice in found] == [first, first + 1]
    assert [c["text"] if "text" in c else c["delta"]["content"] for c in found] == texts
    assert [choice.get("token_ids") for choice in found] == [[7, 8] if ids else None] * 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_choice_ends_once(client: Any, path: str) -> None:
    """Also the one that has ended while another goes on."""
    request: Any = SimpleNamespace(app=client.app, state=SimpleNamespace(log={}))
    answer: Any
    if path == "/v1/completions":
        body = CompletionRequest(prompt="a", n=2, stream=True)
        answer = completions._Answer(request, body, "tiny", 1)
    else:
        chatted = ChatRequest(messages=[Message(role="user", content="a")], n=2, stream=True)
        answer = chat._Answer(request, chatted, "tiny", None)
    answer.begin()
    ended = CompletionOutput(0, "x", [7], finish_reason="stop", delta_text="x", delta_token_ids=[7])
    after = CompletionOutput(0, "x", [7], finish_reason="stop")
    going = CompletionNews(1, 1, "y", [7], [("y", None)], [], None)
    last = CompletionOutput(1, "yyy", [7, 7, 7], finish_reason="length", delta_token_ids=[7])
    told = b"".join([
        answer.news(0, RequestNews("ab", [1, 2], [ended, going], 0, None)),
        answer.news(0, RequestNews("ab", [1, 2], [after, going], 0, None)),
        answer.news(0, RequestOutput("r", "ab", [1, 2], [after, last], finished=True)),
    ])  # fmt: skip
    choices = [part["choices"][0] for part in chunks((told + DONE).decode())]
    found = [(choice["index"], choice["finish_reason"]) for choice in choices]
    assert found == [(0, "stop"), (1, None), (1, None), (1, "length")]


def test_a_prompt_is_echoed_once(client: Any, llm: LLM) -> None:
    """Also where the first token is a part of a character, so that its event has no text."""
    body = CompletionRequest(prompt="ab", echo=True, logprobs=0, stream=True)
    request: Any = SimpleNamespace(app=client.app, state=SimpleNamespace(log={}))
    answer = completions._Answer(request, body, "tiny", 1)
    ids = llm.tokenizer("\u00e9x")["input_ids"]
    assert len(ids) == 3
    rows = [{token: Logprob(-1.0, 1, "x")} for token in ids]
    steps = [("", "", 1, None), ("\u00e9", "\u00e9", 2, None), ("\u00e9x", "x", 3, "length")]
    told = answer.begin()
    for text, new, count, reason in steps:
        choice = CompletionOutput(
            0, text, ids[:count], logprobs=rows[:count], finish_reason=reason, delta_text=new,
            delta_token_ids=ids[count - 1 : count],
        )  # fmt: skip
        finished = reason is not None
        output = RequestOutput("r", "ab", [1, 2], [choice], finished)
        output.prompt_logprobs = [None, {2: Logprob(-2.0, 1, "b")}]
        told += answer.news(0, output)
    choices = [part["choices"][0] for part in chunks((told + DONE).decode())]
    assert [choice["text"] for choice in choices] == ["ab", "\u00e9", "x"]
    scores = [choice["logprobs"]["token_logprobs"] for choice in choices]
    assert scores == [[None, -2.0, -1.0], [-1.0], [-1.0]]
    assert [choice["logprobs"]["text_offset"][-1] for choice in choices] == [2, 2, 3]


def test_what_ends_a_request_comes_behind_other_streams(llm: LLM) -> None:
    """Its last event has been sent, and others of its step have theirs, before it is counted."""
    seen: list[str] = []
    bridge = make_app(llm).state.serving.bridge
    bridge.on_finished = lambda output: seen.append("counted")

    class Writer(EventWriter):
        def news(self, number: int, output: RequestOutput) -> bytes:
            if output.finished:
                seen.append("sent")
                wakes = _wakes_here()
                other = wakes.new()
                other.add_done_callback(lambda _: seen.append("other"))
                wakes.set(other)
            return b""

        def end(self) -> bytes:
            return event("end")

    async def main() -> None:
        request = llm.generate_async("abc", SamplingParams(max_tokens=2, ignore_eos=True))
        client = Client(at_once=9)
        stream = event_stream(Writer(), [Running(request, bridge, 60.0)], 9.0)
        await stream(SCOPE, client.receive, client.send)
        assert client.taken == [b"", event("end"), b""]

    asyncio.run(main())
    assert seen == ["sent", "other", "counted"]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_interpreter_is_as_before_when_the_last_server_has_ended(
    llm: LLM, frozen: bool
) -> None:
    before, collections = sys.getswitchinterval(), gc.get_threshold()
    gc.set_threshold(*((700, 10, 10) if not frozen else (900, 10, 10)))
    own = gc.get_threshold()
    gc.unfreeze()
    if frozen:
        gc.freeze()
    with LiveServer(make_app(llm)):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (own if frozen else COLLECTIONS)
        with LiveServer(make_app(llm)):
            pass
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == pytest.approx(before)
    assert (gc.get_freeze_count() > 0) == frozen
    assert gc.get_threshold() == own
    gc.set_threshold(*collections)
    gc.freeze()  # as tests/conftest.py has left it


@pytest.mark.parametrize("frozen", [False, True])
def test_an_application_goes_when_its_server_has_ended(llm: LLM, frozen: bool) -> None:
    """Also where the process has left objects out of collections."""
    gc.unfreeze()
    if frozen:
        gc.freeze()
    app = make_app(llm)
    left = weakref.ref(app)
    with LiveServer(app):
        pass
    del app
    gc.collect()
    gc.freeze()  # as tests/conftest.py has left it
    assert left() is None


# -- what an event costs --------------------------------------------------------------------------

STREAMS, TOKENS = 12, 60
FIRST, LAST = 10, 50  # passes between which it is counted
STEP_SECONDS = 0.005  # for the loop to send what a step brought; less only makes fewer events
MOST_CALLS = 120


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


ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "tell me", "max_tokens": TOKENS, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "tell me"}], "max_tokens": TOKENS,
        "ignore_eos": True,
    },
    "/v1/responses": {"input": "tell me", "max_output_tokens": TOKENS, "ignore_eos": True},
}  # fmt: skip


@pytest.mark.parametrize("path", ASKED)
def test_an_event_takes_few_calls(tiny_path: Path, path: str) -> None:
    """A count that no machine's speed and no neighbour changes; test_serve_cost.py has times."""
    body = {**ASKED[path], "temperature": 0, "stream": True, "speculative_config": False}
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
    made = calls.names["_look"]  # once for each; a few have no text yet
    assert made > STREAMS * 3
    per_event = calls.names.total() / made
    assert per_event <= MOST_CALLS, calls.names.most_common(40)
