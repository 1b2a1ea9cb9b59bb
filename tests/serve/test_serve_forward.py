"""What stands in front of replicas: which one a request meets, and what its client sees of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from servers import Gate, all_returned, make_app, wait_until
from starlette.testclient import TestClient

from specdec_ext import LLM
from specdec_ext.serve.affinity import affinity_key
from specdec_ext.serve.forward import make_ingress, replay
from specdec_ext.serve.settings import ServerSettings

SCOPE: dict[str, Any] = {"headers": []}
ASK = {"model": "tiny", "prompt": "abcabc", "max_tokens": 8, "temperature": 0}


def key(body: Any, authorization: bytes = b"") -> str:
    headers = [(b"Authorization", authorization)] if authorization else []
    return affinity_key({"headers": headers}, json.dumps(body).encode())


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    turns = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return {"messages": turns, **more}


def test_the_turns_of_a_conversation_have_one_key() -> None:
    turns = [f"turn {i}" for i in range(6)]
    keys = {key(chat(*turns[:n], temperature=n)) for n in (2, 4, 6)}
    assert len(keys) == 1
    assert key(chat("turn 0", "another question")) not in keys
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert key({"input": items[:1]}) == key({"input": items})
    assert key({"input": "a", "instructions": "x"}) != key({"input": "a", "instructions": "y"})


def test_prompts_are_compared_by_their_beginning() -> None:
    long = "".join(random.Random(0).choices("abcdef", k=2000))
    assert key({"prompt": long}) == key({"prompt": long[:1500] + "x"})
    assert key({"prompt": long}) != key({"prompt": "x" + long})
    ids = list(range(400))
    assert key({"prompt": ids}) == key({"prompt": [*ids[:300], 7]}) == key({"prompt": [ids, [1]]})
    assert key({"prompt": ids}) != key({"prompt": ids[1:]})


def test_tenants_have_keys_of_their_own() -> None:
    keys = {
        key(chat("s", "q", **salt), who)
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
        for who in (b"", b"Bearer one", b"Bearer two")
    }
    assert len(keys) == 9
    assert not any("q" in k or "one" in k for k in keys if len(k) != 32)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"max_tokens": 3}', b'{"prompt": 3}']
)
def test_what_has_no_prompt_goes_anywhere(body: bytes) -> None:
    assert affinity_key(SCOPE, body) != affinity_key(SCOPE, body)


@pytest.mark.parametrize(
    "body",
    [{"messages": [3, None]}, {"messages": [{"role": [1], "content": {"a": []}}]}, {"input": 3},
     {"prompt": [[]]}, {"prompt": [{}]}, chat("\ud800", "\udfff")],
)  # fmt: skip
def test_a_body_that_is_not_valid_has_a_key(body: Any) -> None:
    assert len(key(body)) == 32


class Replica:
    """An application behind replay(), as Ray's replica is; dies after `messages` of an answer."""

    def __init__(self, app: Any, messages: int | None = None) -> None:
        self.app, self.messages = app, messages
        self.keys: list[str] = []
        self.cancelled = 0

    def __call__(self, scope: Mapping[str, Any], body: bytes, affinity: str) -> Replica:
        self.keys.append(affinity)
        self._given = (scope, body)
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        count = 0
        async for message in replay(self.app, *self._given):
            if count == self.messages:
                raise RuntimeError("the actor died")
            count += 1
            yield message

    def cancel(self) -> None:
        self.cancelled += 1


def ingress(app: Any, messages: int | None = None, **settings: Any) -> tuple[TestClient, Replica]:
    replica = Replica(app, messages)
    made = make_ingress(replica, ServerSettings(["tiny"], **settings))
    return TestClient(made, raise_server_exceptions=False), replica


def strip(content: Any) -> Any:
    """Without what every answer has of its own."""
    return {k: v for k, v in content.items() if k not in ("id", "created", "metrics")}


def test_answers_pass_through_as_they_are(llm: LLM, client: TestClient) -> None:
    through, replica = ingress(make_app(llm))
    with all_returned(llm):
        for path, body in (
            ("/v1/completions", ASK),
            ("/v1/completions", ASK | {"temperature": "hot"}),
            ("/v1/chat/completions", {"messages": []}),
            ("/nowhere", {}),
        ):
            direct, passed = client.post(path, json=body), through.post(path, json=body)
            assert passed.status_code == direct.status_code
            assert strip(passed.json()) == strip(direct.json())
        assert through.get("/v1/models").json()["data"][0]["id"] == "tiny"
        text = through.post("/v1/completions", json=ASK | {"stream": True}).text
    assert text.endswith("data: [DONE]\n\n")
    pieces = [json.loads(line[6:]) for line in text.split("\n\n")[:-2] if line]
    whole = client.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
    assert replica.cancelled == len(replica.keys)


def test_a_body_over_the_limit_does_not_travel(llm: LLM) -> None:
    through, replica = ingress(make_app(llm), max_body_bytes=2048)
    answer = through.post("/v1/completions", json=ASK | {"prompt": "x" * 4096})
    assert answer.status_code == 413 and replica.keys == []


def test_a_replica_that_dies_before_it_answers_is_a_503(llm: LLM) -> None:
    through, _ = ingress(make_app(llm), messages=0)
    answer = through.post("/v1/completions", json=ASK)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "replica" in answer.json()["error"]["message"]


def test_a_stream_whose_replica_dies_ends_with_one_error(llm: LLM) -> None:
    through, _ = ingress(make_app(llm), messages=2)
    with all_returned(llm):
        answer = through.post("/v1/completions", json=ASK | {"stream": True, "max_tokens": 200})
    events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    errors = [event for event in events[:-1] if "error" in json.loads(event)]
    assert len(errors) == 1 and errors == events[-2:-1]
    assert json.loads(errors[0])["error"]["code"] == "service_unavailable"


def test_a_client_that_goes_cancels_its_request(llm: LLM, gate: Gate) -> None:
    """The engine stands still, so only the cancelling can end the request."""
    app = make_app(llm)
    replica = Replica(app)
    ask = json.dumps(ASK | {"max_tokens": 300}).encode()
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
             "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions",
             "query_string": b"", "root_path": "", "client": None, "server": None,
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    gate.close()

    async def run() -> None:
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": ask, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        made = make_ingress(replica, ServerSettings(["tiny"]))
        task = asyncio.ensure_future(made(scope, receive, send))
        while llm.engine.num_unfinished == 0:
            await asyncio.sleep(0.005)
        gone.set()
        await task

    asyncio.run(run())
    assert replica.cancelled == 1
    gate.open()
    wait_until(lambda: llm.engine.num_unfinished == 0)
