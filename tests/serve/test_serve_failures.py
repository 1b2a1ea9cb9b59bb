"""What goes wrong inside a request: one clear answer, one line in the log; others go on."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from servers import make_app, make_llm
from sse_reader import events

from specdec_ext import LLM, SamplingParams
from specdec_ext.engine import grammar_masks
from specdec_ext.errors import EngineError, RequestError
from specdec_ext.text import chat_worker

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class BadId:
    """A slow tokenizer: it knows no id 7, and says so when it is asked for the text."""

    unk_token_id = chat_template = None
    name_or_path = "slow"

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.eos_token_id = inner.eos_token_id

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return self._inner(text, add_special_tokens=add_special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def get_vocab(self) -> Any:
        return self._inner.get_vocab()

    def decode(self, ids: list[int], **_: Any) -> str:
        if 7 in ids:
            raise IndexError("piece id is out of range")
        return str(self._inner.decode(ids))


def test_a_tokenizer_that_fails_ends_one_request(tiny_path: Path) -> None:
    with make_llm(tiny_path) as llm:
        tokenizer = BadId(llm.tokenizer)
        with LLM(tiny_path, tokenizer=tokenizer, speculative_config=None) as other:

            async def ask() -> list[Any]:
                good = SamplingParams(max_tokens=60, ignore_eos=True, allowed_token_ids=[1, 2, 3])
                bad = SamplingParams(max_tokens=5, allowed_token_ids=[7])
                return list(
                    await asyncio.gather(
                        *(other.generate_async("hello", p) for p in (good, bad, good))
                    )
                )

            first, failed, last = (output.outputs[0] for output in asyncio.run(ask()))
            assert failed.finish_reason == "error"
            assert "piece id is out of range" in (failed.error or "")
            assert first.finish_reason == last.finish_reason == "length"
            assert other.generate("hello", SamplingParams(max_tokens=2))[0].finished
            assert other.engine.num_unfinished == 0


def test_an_engine_that_fails_is_no_cancellation(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(tiny_path) as llm:

        def broken() -> bool:
            raise EngineError("the device is gone")

        monkeypatch.setattr(llm.engine, "step", broken)

        async def ask() -> Any:
            return await llm.generate_async("hello", SamplingParams(max_tokens=4))

        (output,) = asyncio.run(ask()).outputs
        assert output.finish_reason == "error" and "the device is gone" in output.error


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 10},
         "no token is allowed here: structured_outputs"),
        ({"allowed_token_ids": [66], "bad_words": ["c"]}, "no token is allowed here"),
        ({"response_format": {"type": "json_object"}, "allowed_token_ids": [66]},
         "no token is allowed here: response_format"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_answered_is_told_why(
    client: TestClient, caplog: pytest.LogCaptureFixture, asked: dict[str, Any], said: str,
    stream: bool,
) -> None:  # fmt: skip
    """The log has it at the request's id."""
    turn = {"messages": [TURN]} if "response_format" in asked else {"prompt": "a"}
    path = CHAT if "messages" in turn else COMPLETIONS
    body = {**turn, "max_tokens": 40, "temperature": 0, **asked, "stream": stream}
    caplog.clear()
    reply = client.post(path, json=body, headers={"X-Request-Id": "mine-7"})
    if stream:
        assert reply.status_code == 200
        error = json.loads(list(events(reply.text))[-2][1])["error"]
    else:
        assert reply.status_code == 400
        error = reply.json()["error"]
    assert error["message"].startswith(said) and error["type"] == "invalid_request_error"
    lines = [r for r in caplog.records if r.name == "specdec_ext" and "mine-7" in r.getMessage()]
    assert len(lines) == 1 and said[:20] in lines[0].getMessage()


def test_a_grammar_that_fails_is_named_by_the_requests_field(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its matcher was given a token that it does not allow, and no other can be made."""
    start = grammar_masks.GrammarMasks.start

    def spoil(self: Any, rid: int, compiled: Any, **options: Any) -> None:
        start(self, rid, compiled, **options)
        output = self._outputs[rid]
        output.matcher.consume_token(66)
        monkeypatch.setattr(output.grammar, "_make", None)

    monkeypatch.setattr(grammar_masks.GrammarMasks, "start", spoil)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    body = {"messages": [TURN], "max_tokens": 4, "response_format": form}
    reply = client.post(CHAT, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"].startswith("the grammar of response_format failed: ")


def test_scores_that_are_no_numbers_are_named(
    llm: LLM, client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = llm.engine.model.forward

    def broken(plan: Any, *more: Any) -> Any:
        scores = forward(plan, *more)
        scores[:] = float("nan")
        llm.engine.model.best_ids = None  # they were of other scores
        return scores

    monkeypatch.setattr(llm.engine.model, "forward", broken)
    reply = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3})
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "engine_error"
    assert "scores hold a NaN" in reply.json()["error"]["message"]
    assert f"request {reply.headers['x-request-id']} failed: the model's scores" in caplog.text


def test_an_unexpected_error_has_a_line_and_an_id(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make_llm(tiny_path) as llm:
        app = make_app(llm)

        def broken(*_: Any) -> Any:
            raise RuntimeError("never seen before")

        monkeypatch.setattr(app.state.serving.bridge, "in_thread", broken)
        logger = logging.getLogger("specdec_ext.access")
        # No propagation: its parents may have this handler, too.
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        with caplog.at_level(logging.INFO, logger.name):
            client = TestClient(app, raise_server_exceptions=False)
            answer = client.post("/tokenize", json={"prompt": "hello"})
        assert answer.status_code == 500 and answer.headers["x-request-id"]
        assert "never seen before" not in answer.text
        lines = [json.loads(r.message) for r in caplog.records if r.name == logger.name]
        assert [line["status"] for line in lines] == [500]


TURN = {"role": "user", "content": "hello"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (CHAT, {"messages": [TURN, {
            "role": "assistant", "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}],
        }]}, "tool_calls"),
        (CHAT, {"messages": [TURN], "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": nested(900)}},
        ]}, "nested too deep"),
        (CHAT, {"messages": [{"role": "user"}]}, "a user's turn needs a text"),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, "a user's turn needs a text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text"),
        (CHAT, {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a", "image_url": {"url": "b"}},
        ]}]}, "image_url"),
    ],
)  # fmt: skip
def test_bad_fields_are_the_callers(
    tiny_path: Path, path: str, body: dict[str, Any], said: str
) -> None:
    with make_llm(tiny_path) as llm:
        client = TestClient(make_app(llm), raise_server_exceptions=False)
        answer = client.post(path, json={"max_tokens": 2, **body})
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_a_stream_of_steps_lacks_none(tiny_path: Path) -> None:
    with make_llm(tiny_path, max_num_tokens=16, max_batch_size=4) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True, return_steps=True)
        seen, last = [], None
        for last in llm.stream("a prompt of several chunks, " * 6, params):
            seen += last.outputs[0].delta_steps
        assert last is not None and seen == last.outputs[0].steps
        assert sum(step.is_prefill for step in seen) > 2  # those that bring no token


def test_one_turn_is_no_conversation(tiny_path: Path) -> None:
    with make_llm(tiny_path) as llm, pytest.raises(RequestError, match="put a single turn into"):
        llm.chat({"role": "user", "content": "hello"})  # type: ignore[arg-type]


def test_the_template_worker_keeps_to_a_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(chat_worker.resource, "getrlimit", lambda _: (100, 1000))
    monkeypatch.setattr(chat_worker.resource, "setrlimit", lambda *given: asked.append(given))
    chat_worker.limit_to(7, 500)
    chat_worker.limit_to(7, 5000)
    assert asked == [(7, (500, 1000)), (7, (1000, 1000))]
