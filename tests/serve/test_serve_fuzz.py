"""Requests made from the OpenAPI document, valid and not: none is a 500, none leaves anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from servers import all_returned, make_app, make_llm
from starlette.testclient import TestClient

from specdec_ext import LLM

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
STATUSES = (200, 400, 404, 408, 413, 429, 503)


@pytest.fixture(scope="module")
def small(tiny_path: Any) -> Iterator[LLM]:
    """Answers of at most 24 tokens, so that a request without a length is short too."""
    with make_llm(tiny_path, max_seq_len=64) as made:
        yield made


def fuzz(llm: LLM, examples: int) -> None:
    """`examples` requests to each path, made by schemathesis."""
    app = make_app(llm)
    client = TestClient(app, raise_server_exceptions=False)
    document = schemathesis.openapi.from_dict(app.openapi())
    found: set[int] = set()
    for path in PATHS:
        found |= fuzz_path(client, path, document[path]["POST"], examples)
    assert {200, 400} <= found


def fuzz_path(client: TestClient, path: str, operation: Any, examples: int) -> set[int]:
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))
    found: set[int] = set()

    @settings(
        max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=cases)
    def check(case: Any) -> None:
        try:
            content = json.dumps(case.body)
        except TypeError:  # no JSON: sent as it is
            content = str(case.body)
        reply = client.post(path, content=content, headers={"content-type": "application/json"})
        assert reply.status_code in STATUSES, reply.text
        found.add(reply.status_code)
        if reply.status_code != 200:
            assert reply.json()["error"].keys() == {"message", "type", "param", "code"}

    check()
    return found


def test_requests_from_the_document(small: LLM) -> None:
    with all_returned(small):
        fuzz(small, 60)


@pytest.mark.slow
def test_five_thousand_requests_from_the_document(small: LLM) -> None:
    with all_returned(small):
        fuzz(small, 1000)


# What clients really send, with one thing wrong: nearer to the code than what a document says.
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4),
    st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=5)), max_size=3),
)  # fmt: skip


def wrong_fields(llm: LLM, examples: int) -> None:
    from specdec_ext.serve.schema.chat import ChatRequest
    from specdec_ext.serve.schema.completions import CompletionRequest
    from specdec_ext.serve.schema.responses import ResponsesRequest

    client = TestClient(make_app(llm), raise_server_exceptions=False)
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("/v1/chat/completions", ChatRequest,
         {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
        ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 3}),
        ("/v1/responses", ResponsesRequest, {"input": "x", "max_output_tokens": 3}),
    ]  # fmt: skip

    @settings(max_examples=examples, phases=[Phase.generate])
    @given(data=st.data())
    def check(data: Any) -> None:
        path, model, base = data.draw(st.sampled_from(kinds))
        names = st.sampled_from(sorted(model.model_fields))
        changes = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
        content = json.dumps({**base, **changes})
        reply = client.post(path, content=content, headers={"content-type": "application/json"})
        assert reply.status_code in STATUSES, (content, reply.text)

    check()


def test_wrong_values_of_real_fields(small: LLM) -> None:
    with all_returned(small):
        wrong_fields(small, 300)


@pytest.mark.slow
def test_many_wrong_values_of_real_fields(small: LLM) -> None:
    with all_returned(small):
        wrong_fields(small, 5000)
