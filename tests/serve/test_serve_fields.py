"""Every field is honoured, accepted because it asks for nothing, or answered 400 with its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from servers import make_app, make_llm
from starlette.testclient import TestClient

from specdec_ext import LLM, SamplingParams
from specdec_ext.serve.schema.chat import ChatRequest, Message, conversation
from specdec_ext.serve.schema.common import OFF
from specdec_ext.serve.schema.completions import CompletionRequest
from specdec_ext.serve.schema.responses import ResponsesRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
RESPONSE: dict[str, Any] = {"input": "hi", "max_output_tokens": 2}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
}


def refused(client: TestClient, path: str, body: Any, param: str | None, status: int = 400) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return error


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_params.CompletionCreateParamsBase),
        (ResponsesRequest, responses_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_the_schema_is_known(ours: Any, theirs: Any) -> None:
    assert set(theirs.__annotations__) - set(ours.model_fields) == set()


def test_the_table_holds_no_field_that_nobody_has() -> None:
    declared = set()
    for model in (ChatRequest, CompletionRequest, ResponsesRequest):
        declared |= {model.names_of_off_fields.get(name, name) for name in model.model_fields}
    assert set(OFF) <= declared


@pytest.mark.parametrize("name", sorted(OFF))
def test_fields_that_are_not_served(client: TestClient, name: str) -> None:
    """Off is accepted in all its spellings; anything else is refused by name."""
    for path, body in PATHS.items():
        model = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest,
                 "/v1/responses": ResponsesRequest}[path]  # fmt: skip
        own = {model.names_of_off_fields.get(n, n): n for n in model.model_fields}
        if name not in own or own[name] in body:
            continue
        for off in OFF[name][0]:
            assert client.post(path, json={**body, own[name]: off}).status_code == 200
        for value in ({"x": 1}, ["x"], "something", 7, True):
            if any(value is off for off in OFF[name][0]):
                continue
            assert (
                own[name] in refused(client, path, {**body, own[name]: value}, own[name])["message"]
            )


@pytest.mark.parametrize(
    "values",
    [
        {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "k"},
        {"parallel_tool_calls": True, "response_format": {"type": "text"}, "tools": [], "n": 1},
        {"structured_outputs": None, "speculative_config": None, "temperature": None, "stop": None},
        {"speculative_config": True, "cache_salt": "s"},
        {"chat_template_kwargs": None, "best_of": 1, "detokenize": True, "guided_json": None},
        {"speculative_config": {"max_draft_len": 1, "adaptive": False}},
        {"speculative_config": "ngram"},
        {"max_completion_tokens": 2, "top_p": 1, "add_generation_prompt": True},
        {"messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b", "name": "me"},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        ]},
    ],
)  # fmt: skip
def test_values_that_are_accepted(client: TestClient, values: dict[str, Any]) -> None:
    assert client.post("/v1/chat/completions", json={**CHAT, **values}).status_code == 200


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages.0.y"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages.0.refusal"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages.0.content"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 100000}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 10000}, "stop"),
        ({"stop": 7}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100000}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"json": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs"),
        ({"structured_outputs": {"json": {"const": "a" * 300_000}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}],
          "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"bad_words": [5]}, "bad_words.0"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"speculative_config": {"model": "/etc/passwd"}}, "speculative_config.model"),
        ({"speculative_config": {"method": "ngram", "is_public_pool": True}},
         "speculative_config.is_public_pool"),
        ({"speculative_config": {"synthetic_acceptance_length": 3}},
         "speculative_config.synthetic_acceptance_length"),
        ({"speculative_config": {"medusa_choices": "/etc/passwd"}},
         "speculative_config.medusa_choices"),
        ({"speculative_config": {"lookahead_config": {"path": 1}}},
         "speculative_config.lookahead_config"),
        ({"speculative_config": {"method": "../x.yaml"}}, "speculative_config.method"),
        ({"speculative_config": "/etc/passwd.yaml"}, "speculative_config"),
        ({"speculative_config": 7}, "speculative_config"),
        ({"speculative_config": {"method": "medusa"}}, "speculative_config"),
        ({"speculative_config": {"max_draft_len": 100}}, "max_draft_len"),
        ({"speculative_config": {"nonsense": 1}}, "speculative_config"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client: TestClient, values: dict[str, Any], param: str) -> None:
    refused(client, "/v1/chat/completions", {**CHAT, **values}, param)


@pytest.mark.parametrize(
    ("values", "param", "remedy"),
    [
        ({"functions": [{"name": "f"}]}, "functions", "give the functions as `tools`"),
        ({"function_call": "auto"}, "function_call", "as `tools` and `tool_choice`"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0", "of role 'tool'"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages.0",
         "give a call as `tool_calls`"),
    ],
)  # fmt: skip
def test_old_fields_of_functions_name_the_new_ones(
    client: TestClient, values: dict[str, Any], param: str, remedy: str
) -> None:
    error = refused(client, "/v1/chat/completions", {**CHAT, **values}, param)
    assert remedy in error["message"]


@pytest.mark.parametrize("name", ["choice", "grammar", "json", "regex"])
def test_vllms_old_fields_of_forms_name_the_new_one(client: TestClient, name: str) -> None:
    for path, body in PATHS.items():
        error = refused(client, path, {**body, f"guided_{name}": ["x"]}, f"guided_{name}")
        assert f'give it as structured_outputs = {{"{name}": ...}}' in error["message"]


@pytest.mark.parametrize(
    ("path", "values", "param"),
    [
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [99999]}, "prompt"),
        ("/v1/completions", {"prompt": [["a"]]}, "prompt.0.0"),
        ("/v1/completions", {"prompt": "x" * 600}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 200000}, "n"),
        ("/v1/completions", {"logprobs": 99}, "logprobs"),
        ("/v1/completions", {"messages": []}, "messages"),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"]}, "include"),
        ("/v1/responses", {"top_logprobs": 1}, "top_logprobs"),
        (
            "/v1/responses",
            {"include": ["message.output_text.logprobs"], "top_logprobs": 99},
            "top_logprobs",
        ),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"max_output_tokens": 100000}, "max_output_tokens"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format"),
        ("/v1/responses", {"text": {"verbosity": "high"}}, "text.verbosity"),
        ("/v1/responses", {"input": [{"type": "function_call"}]}, "input.0"),
        ("/v1/responses", {"previous_response_id": "resp-1"}, "previous_response_id"),
        (
            "/v1/responses",
            {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            "stream_options.continuous_usage_stats",
        ),
        ("/v1/responses", {"input": []}, "input"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
    ],
)
def test_refusals_elsewhere(
    client: TestClient, path: str, values: dict[str, Any], param: str | None
) -> None:
    base = {"/v1/completions": TEXT, "/v1/responses": RESPONSE}.get(path, {})
    refused(client, path, {**base, **values}, param)


TEXT_PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("path", "values", "param", "said"),
    [
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": [{**TEXT_PART, "cache_control": {}}]}]},
         "messages.0.content.0.cache_control", "there is no such field; remove it"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": [TEXT_PART, {"type": "text", "text": 5}]}]},
         "messages.0.content.1.text", "valid string, got 5"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]},
         "messages.0.content", "expected a text or a list, got 5"),
        ("/v1/chat/completions", {"stop": [1]}, "stop.0", "valid string, got 1"),
        ("/v1/chat/completions", {"stop": 7}, "stop", "expected a text or a list, got 7"),
        ("/v1/chat/completions", {"int": 7}, "int", "there is no such field"),
        ("/v1/completions", {"prompt": ["a", None]}, "prompt.1", "valid string, got None"),
        ("/v1/completions", {"prompt": [1, 2.5]}, "prompt.1", "valid integer, got 2.5"),
        ("/v1/completions", {"prompt": [[1], ["a", "b"]]}, "prompt.1.0", "integer, got 'a'"),
        ("/v1/responses", {"input": [{"role": "user", "content": "x", "name": "me"}]},
         "input.0.name", "there is no such field"),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "x", "detail": "auto"}]}]},
         "input.0.content", "only parts of type 'text' are supported, got 'input_image'"),
        ("/v1/responses", {"input": [{"role": "tool", "content": "x"}]}, "input.0.role",
         "go to /v1/chat/completions"),
        ("/v1/responses", {"input": [{"role": "king", "content": "x"}]}, "input.0.role",
         "got 'king'"),
        ("/v1/responses",
         {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
         "input.0", "got type 'function_call_output'; calls of functions"),
        ("/v1/responses", {"input": []}, "input", "input is an empty list; give a text"),
        ("/v1/responses", {"input": 5}, "input", "expected a text or a list, got 5"),
    ],
)  # fmt: skip
def test_errors_inside_alternatives_are_those_of_the_one_that_was_meant(
    client: TestClient, path: str, values: dict[str, Any], param: str, said: str
) -> None:
    assert said in refused(client, path, {**PATHS[path], **values}, param)["message"]


def test_a_response_is_taken_as_input(client: TestClient) -> None:
    """With everything that this server writes into it."""
    more = {"include_token_sources": True, "include_steps": True,
            "include": ["message.output_text.logprobs"]}  # fmt: skip
    first = client.post("/v1/responses", json={**RESPONSE, **more}).json()
    [part] = first["output"][0]["content"]
    assert part["token_sources"] and part["steps"] and part["logprobs"]
    turns = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "x"}]
    reply = client.post("/v1/responses", json={**RESPONSE, "input": turns})
    assert reply.status_code == 200, reply.text
    plain = [turns[0], {"role": "assistant", "content": part["text"]}, turns[2]]
    again = client.post("/v1/responses", json={**RESPONSE, "input": plain}).json()
    assert reply.json()["usage"]["input_tokens"] == again["usage"]["input_tokens"]


def test_a_missing_model_is_a_404(client: TestClient) -> None:
    for path, body in PATHS.items():
        error = refused(client, path, {**body, "model": "gpt-4"}, "model", 404)
        assert error["code"] == "model_not_found"
        assert client.post(path, json={**body, "model": "tiny"}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"7", b"null", b'"x"',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"\\ud800": 1, "messages": []}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(client: TestClient, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = client.post("/v1/chat/completions", content=content, headers=headers)
    assert reply.status_code == 400, reply.text
    assert json.loads(reply.content)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the body is empty, or null; send a JSON object"),
        (b"null", "the body is empty, or null"),
        (b"7", "the body is 7; send a JSON object"),
        (b'{"prompt": }', "not valid JSON: Expecting value at character 11"),
        ('{"prompt": "\u00e9"}'.encode("latin-1"), "the body is not valid UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "an integer of too many digits"),
    ],
)
def test_bodies_are_told_what_is_wrong(client: TestClient, content: bytes, said: str) -> None:
    headers = {"content-type": "application/json"}
    reply = client.post("/v1/completions", content=content, headers=headers)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


def test_a_body_of_another_type_is_told_the_header(client: TestClient) -> None:
    """What curl -d sends without -H."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    reply = client.post("/v1/completions", content=json.dumps(TEXT), headers=headers)
    assert reply.status_code == 400
    assert "Content-Type: application/json" in reply.json()["error"]["message"]


def test_other_paths_and_methods(client: TestClient) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405),
    ):  # fmt: skip
        reply = client.request(method, path)
        assert reply.status_code == status
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_arguments_of_earlier_calls_keep_the_clients_words() -> None:
    own = '{"city":"R\u00f6m",  "n":1.0}'
    call = {"id": "1", "type": "function", "function": {"name": "go", "arguments": own}}
    turns = [Message(role="assistant", content="Yes.", tool_calls=[call, call])]
    [turn] = conversation(turns)
    line = f'{{"name": "go", "arguments": {own}}}'
    assert turn["content"] == f"Yes.\n{line}\n{line}"
    call["function"]["arguments"] = {"city": "R\u00f6m"}
    empty = {"function": {"name": "stay", "arguments": ""}}
    [turn] = conversation([Message(role="assistant", tool_calls=[call, empty])])
    assert [json.loads(line) for line in turn["content"].split("\n")] == [
        {"name": "go", "arguments": {"city": "R\u00f6m"}}, {"name": "stay", "arguments": {}},
    ]  # fmt: skip
    kept = conversation(
        [Message(role="assistant", tool_calls=[call]),
         Message(role="tool", tool_call_id="1", content="x")],
        keeps_calls=True,
    )  # fmt: skip
    assert kept[0]["tool_calls"][0]["id"] == kept[1]["tool_call_id"] == "1"


def test_variables_of_the_chat_template(tiny_path: Path, tmp_path: Path) -> None:
    """In a chat, in /tokenize and in LLM.chat alike."""
    folder = shutil.copytree(tiny_path, tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if enable_thinking is false %} at once{% endif %}"
    )
    with make_llm(folder) as llm:
        asked = TestClient(make_app(llm), raise_server_exceptions=False)
        for given, text in (({"enable_thinking": False}, "hi at once"), (None, "hi"), ({}, "hi")):
            body = {"messages": CHAT["messages"], "chat_template_kwargs": given}
            tokens = asked.post("/tokenize", json=body).json()["tokens"]
            assert llm.tokenizer.decode(tokens) == text
            answer = asked.post("/v1/chat/completions", json={**CHAT, **body}).json()
            assert answer["usage"]["prompt_tokens"] == len(tokens)
            [output] = llm.chat(
                CHAT["messages"], SamplingParams(max_tokens=1), chat_template_kwargs=given,
                use_tqdm=False,
            )  # fmt: skip
            assert output.prompt == text


def test_parts_of_text_are_what_llm_chat_takes(client: TestClient, llm: LLM) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "h"},
                                          {"type": "text", "text": "i"}]}]  # fmt: skip
    params = SamplingParams(max_tokens=2)
    [want] = llm.chat(CHAT["messages"], params, use_tqdm=False)
    assert llm.chat(turns, params, use_tqdm=False)[0].prompt == want.prompt
    told = client.post("/tokenize", json={"messages": turns}).json()
    assert told["tokens"] == want.prompt_token_ids
