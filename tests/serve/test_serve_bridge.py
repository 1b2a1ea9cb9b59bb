"""Admission, deadlines, clients that leave, the end of a server: with an engine that waits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
from typing import Any

import httpx2
import pytest
from openai.types.responses import ResponseErrorEvent
from servers import Gate, LiveServer, all_returned, make_app, make_llm, wait_until
from sse_reader import choice_text, chunks, events

from specdec_ext import LLM, SamplingParams
from specdec_ext.errors import QueueFullError

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def send(port: int, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request on a connection of its own, whose answer nobody has read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_within_a_step(
    llm: LLM, live: LiveServer, gate: Gate, stream: bool
) -> None:
    before = llm.get_metrics()["request_success"].get("cancelled", 0)
    gate.close()
    with all_returned(llm):
        connection = send(live.port, {**LONG, "stream": stream})
        wait_until(lambda: llm.engine.num_unfinished == 1)
        passes = gate.passes
        connection.close()
        # Not one pass has to end for it.
        wait_until(lambda: llm.engine.num_unfinished == 0)
        assert gate.passes == passes
        gate.open()
    assert llm.get_metrics()["request_success"]["cancelled"] == before + 1


def test_a_full_queue_is_a_429(tiny_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(tiny_path, max_queued_requests=2) as llm, LiveServer(make_app(llm)) as live:
        gate = Gate(llm)
        gate.close()
        connections = [send(live.port, LONG) for _ in range(2)]
        wait_until(lambda: llm.engine.num_unfinished == 2)
        for path, body in (
            ("/v1/completions", LONG),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x", "stream": True}),
        ):
            reply = httpx2.post(live.url + path, json=body)
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["code"] == "queue_full"
        # More than it could ever hold is no matter of waiting.
        never = httpx2.post(live.url + "/v1/completions", json={**LONG, "prompt": ["a"] * 3})
        assert never.status_code == 400
        # Who asks after the server takes no place, whatever the limit says by then.
        monkeypatch.setattr(
            llm.engine, "limits", dataclasses.replace(llm.engine.limits, max_queued_requests=1)
        )
        for path in ("/ready", "/health", "/metrics"):
            assert httpx2.get(live.url + path).status_code == 200
        monkeypatch.undo()
        for connection in connections:
            connection.close()
        wait_until(lambda: llm.engine.num_unfinished == 0)
        gate.open()
        again = httpx2.post(live.url + "/v1/completions", json={**LONG, "max_tokens": 2})
        assert again.status_code == 200


def test_a_refusal_counts_the_requests_that_are_unfinished(
    tiny_path: Any,
) -> None:
    """Those of others that are still being read are no more requests of this one's."""
    with make_llm(tiny_path, max_queued_requests=4) as llm:
        bridge = make_app(llm).state.serving.bridge
        gate = threading.Event()

        def reading(reader: Any) -> Any:
            gate.wait()
            return reader.read("a")

        async def main() -> None:
            params = SamplingParams(max_tokens=1)
            first = [asyncio.ensure_future(bridge.start([reading], params)) for _ in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="1 more requests with 4 unfinished exceed"):
                await bridge.start([reading], params)
            gate.set()
            for running in await asyncio.gather(*first):
                await running[0].result()

        asyncio.run(main())


def test_a_deadline_is_a_504_or_the_last_event(llm: LLM, gate: Gate) -> None:
    with LiveServer(make_app(llm, request_seconds=0.2)) as live, all_returned(llm):
        gate.close()
        reply = httpx2.post(live.url + "/v1/completions", json=LONG)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "timeout"
        for path, body in (
            ("/v1/completions", LONG),
            ("/v1/responses", {"input": "x"}),
        ):
            streamed = httpx2.post(live.url + path, json={**body, "stream": True})
            assert streamed.status_code == 200
            found = list(events(streamed.text))
            assert found[-1] == (None, "[DONE]")
            name, data = found[-2]
            assert json.loads(data)["error"]["code"] == "timeout"
            if path == "/v1/responses":  # its events have names, numbers and OpenAI's fields
                assert name == "error"
                failed = ResponseErrorEvent.model_validate_json(data)
                assert (failed.code, failed.sequence_number) == ("timeout", len(found) - 2)
        gate.open()


def test_an_engine_that_fails_is_a_500_without_its_words(
    llm: LLM, live: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("words of the inside")

    with all_returned(llm):
        monkeypatch.setattr(llm.engine.model, "forward", fail)
        reply = httpx2.post(live.url + "/v1/completions", json=LONG)
        assert reply.status_code == 500 and "inside" not in reply.text
        assert reply.json()["error"]["code"] == "engine_error"
        streamed = httpx2.post(live.url + "/v1/completions", json={**LONG, "stream": True})
        assert json.loads(list(events(streamed.text))[-2][1])["error"]["code"] == "engine_error"
        monkeypatch.undo()
        assert httpx2.post(live.url + "/v1/completions", json=LONG).status_code == 200
    id_of = reply.headers["x-request-id"]
    assert f"request {id_of} failed: forward pass failed: RuntimeError: words of" in caplog.text


def test_a_closed_engine_is_a_503(tiny_path: Any) -> None:
    with make_llm(tiny_path) as llm, LiveServer(make_app(llm)) as live:
        llm.close()
        for path in ("/health", "/ready"):
            assert httpx2.get(live.url + path).status_code == 503
        reply = httpx2.post(live.url + "/v1/completions", json=LONG)
        assert reply.status_code == 503 and "retry-after" in reply.headers


def test_an_engine_that_has_stopped_says_so(tiny_path: Any) -> None:
    """Who restarts servers is told that this one is not being shut down."""
    with make_llm(tiny_path) as llm, LiveServer(make_app(llm)) as live:
        llm.engine._stop_for(MemoryError("words of the inside"))
        get, post = httpx2.get, httpx2.post
        for reply in (
            get(live.url + "/health"),
            get(live.url + "/ready"),
            post(live.url + "/v1/completions", json=LONG),
        ):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (503, "engine_error")
            assert "the engine has stopped" in error["message"] and "inside" not in reply.text


def test_a_slow_reader_gets_fewer_larger_events(llm: LLM, live: LiveServer, gate: Gate) -> None:
    """While nobody reads, tokens gather in the request; none is lost."""
    want = llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    connection = send(live.port, {**LONG, "stream": True})
    wait_until(lambda: llm.engine.num_unfinished == 0)  # it never waited for this client
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(65536)
    connection.close()
    body = received.partition(b"\r\n\r\n")[2]
    lines = [line for line in body.split(b"\r\n") if b"data:" in line]
    parts = chunks(b"".join(lines).decode())
    assert choice_text(parts) == want[0].outputs[0].text
    assert len(parts) <= 200


def test_tokens_of_one_step_are_one_event(llm: LLM, live: LiveServer, gate: Gate) -> None:
    """An event carries all that a step brought, drafts included: at most one event per pass."""
    body = {**LONG, "prompt": "ababababab", "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    parts = chunks(httpx2.post(live.url + "/v1/completions", json=body).text)
    *steps, last = parts
    sizes = [len(part["choices"][0]["token_ids"]) for part in steps]
    assert sum(sizes) == last["usage"]["completion_tokens"] == 200
    assert len(steps) <= last["metrics"]["num_forward_passes"] < 200


def test_drain(tiny_path: Any) -> None:
    """Told to stop: running answers end as they would have, new ones are refused, and what does
    not end in time is told so."""
    with make_llm(tiny_path) as llm:
        want = llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True),
                            use_tqdm=False)[0].outputs[0].text  # fmt: skip
        app = make_app(llm, drain_seconds=60.0)
        gate = Gate(llm)
        bridge = app.state.serving.bridge

        async def main() -> None:
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:

                async def post(**more: Any) -> Any:
                    return await client.post("/v1/completions", json={**LONG, **more})

                gate.close()
                running = asyncio.create_task(post(stream=True))
                while llm.engine.num_unfinished < 1:
                    await asyncio.sleep(0.005)
                bridge.drain()
                bridge.drain()  # twice is once
                refused = await post()
                assert refused.status_code == 503 and "retry-after" in refused.headers
                assert (await client.get("/ready")).status_code == 503
                assert (await client.get("/health")).status_code == 200
                gate.open()
                assert choice_text(chunks((await running).text)) == want

        asyncio.run(main())
        late_app = make_app(llm, drain_seconds=0.3)
        late_bridge = late_app.state.serving.bridge

        async def late() -> None:
            transport = httpx2.ASGITransport(app=late_app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:
                gate.close()
                kinds = [asyncio.create_task(client.post("/v1/completions",
                                                         json={**LONG, "stream": stream}))
                         for stream in (False, True)]  # fmt: skip
                while llm.engine.num_unfinished < 2:
                    await asyncio.sleep(0.005)
                late_bridge.drain()
                whole, streamed = await asyncio.gather(*kinds)
                assert whole.status_code == 503
                error = json.loads(list(events(streamed.text))[-2][1])["error"]
                assert error["code"] == "service_unavailable"
                gate.open()

        with all_returned(llm):
            asyncio.run(late())
