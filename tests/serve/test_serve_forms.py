"""Answers in a form, calls of functions and predicted outputs, by OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from servers import LiveServer

from specdec_ext import LLM, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "abcabcabc"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "travel", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "stay", "description": "Stay at home."}},
]


@pytest.fixture
def api(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none") as client:
        yield client


def ask(api: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 120}
    return api.chat.completions.create(**{**given, **more})


def check_trip(text: str | None) -> None:
    trip = json.loads(text or "")
    assert trip["city"] in ("Rome", "Oslo") and trip["days"] in (1, 2, 3) and len(trip) == 2


def test_structured_answers(llm: LLM, api: openai.OpenAI) -> None:
    whole = ask(api, response_format=FORMAT)
    check_trip(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "stop"
    params = SamplingParams(max_tokens=120, structured_outputs={"json": SCHEMA})
    [same] = llm.chat(MESSAGES, params, use_tqdm=False)
    assert same.outputs[0].text == whole.choices[0].message.content
    plain = ask(api, response_format=FORMAT, extra_body={"speculative_config": False})
    assert plain.choices[0].message.content == whole.choices[0].message.content
    parts = list(ask(api, response_format=FORMAT, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    extra = {"structured_outputs": {"regex": "(ab|cd){2}[0-9]"}}
    short = ask(api, extra_body=extra, temperature=1, seed=3)
    assert re.fullmatch("(ab|cd){2}[0-9]", short.choices[0].message.content)
    made = api.completions.create(
        model="tiny",
        prompt="ab",
        max_tokens=9,
        extra_body={"structured_outputs": {"choice": ["x"]}},
    )
    assert made.choices[0].text == "x"
    response = api.responses.create(
        model="tiny", input="abc", max_output_tokens=120, temperature=0,
        text={"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}},
    )  # fmt: skip
    check_trip(response.output_text)


def test_a_form_that_cannot_be_held_is_a_400(api: openai.OpenAI) -> None:
    for schema in ({"not": {}}, {"type": "object", "required": ["a"], "properties": {"a": False}}):
        wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as caught:
            ask(api, response_format=wrong)
        assert caught.value.param == "response_format"
        assert caught.value.body["message"].startswith("the schema of response_format = ")


def test_calls_of_functions(api: openai.OpenAI) -> None:
    travel = {"type": "function", "function": {"name": "travel"}}
    whole = ask(api, tools=TOOLS, tool_choice=travel)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "travel"
    check_trip(call.function.arguments)
    parts = list(ask(api, tools=TOOLS, tool_choice=travel, stream=True))
    [streamed] = [part.choices[0].delta.tool_calls for part in parts
                  if part.choices[0].delta.tool_calls]  # fmt: skip
    assert streamed[0].function.arguments == call.function.arguments
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    any_of = ask(api, tools=TOOLS, tool_choice="required", temperature=1, seed=1)
    if any_of.choices[0].finish_reason == "tool_calls":
        assert any_of.choices[0].message.tool_calls[0].function.name in ("travel", "stay")
    # The conversation goes on behind the call.
    turns = [*MESSAGES, choice.message.model_dump(exclude_none=True),
             {"role": "tool", "tool_call_id": call.id, "content": "done"}]  # fmt: skip
    assert ask(api, messages=turns, max_tokens=4).choices[0].message.content is not None
    assert (
        ask(api, tools=TOOLS, tool_choice="none", max_tokens=4).choices[0].message.tool_calls
        is None
    )
    cut = ask(api, tools=TOOLS, tool_choice=travel, max_tokens=3)
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="auto"):
        ask(api, tools=TOOLS)


def test_predicted_outputs(api: openai.OpenAI) -> None:
    free = ask(api, max_tokens=40)
    text = free.choices[0].message.content
    assert free.usage.completion_tokens_details is None
    for content in (text, [{"type": "text", "text": text}]):
        told = ask(api, max_tokens=40, prediction={"type": "content", "content": content})
        assert told.choices[0].message.content == text
        details = told.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 0
        assert details.rejected_prediction_tokens is not None
    useless = ask(api, max_tokens=40, prediction={"type": "content", "content": "\x01\x02" * 20})
    assert useless.choices[0].message.content == text
    assert useless.usage.completion_tokens_details.rejected_prediction_tokens > 0
    parts = list(
        ask(api, max_tokens=40, prediction={"type": "content", "content": text}, stream=True,
            stream_options={"include_usage": True})
    )  # fmt: skip
    assert parts[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0
