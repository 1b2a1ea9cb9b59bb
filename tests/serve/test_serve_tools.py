"""Functions that the model may call: the format that a template has, the grammar of such answers,
what is read of them, and all of it over HTTP."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import LiveServer, make_app, make_llm

from specdec_ext import LLM, SamplingParams
from specdec_ext.errors import RequestError
from specdec_ext.request.structured_outputs import check_structured_outputs
from specdec_ext.serve.tool_format import (
    CLOSING,
    OPENING,
    CallReader,
    ToolFormat,
    format_of,
    writes_calls,
)
from specdec_ext.text.grammar import GrammarCompiler
from tiny_models import save_tiny

# As Qwen's: functions in the system turn, calls between marks, answers of functions in a user's.
QWEN = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}' }}
{{- '\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "travel", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stay", "description": "Stay at home."}},
]
SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"name": {"const": "travel"}, "arguments": PARAMETERS},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
    ]
}
CALL = '{"name": "travel", "arguments": {"city": "Rome"}}'


def with_template(path: Path, template: str) -> Path:
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["marks are tokens", "marks are spelled"])
def caller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(a model whose template has the format, are the marks tokens of it)"""
    extra = (OPENING, CLOSING) if request.param else ()
    path = save_tiny(
        tmp_path_factory.mktemp("caller") / "tiny", extra=extra, max_position_embeddings=2048
    )
    with make_llm(with_template(path, QWEN)) as made:
        yield made, request.param


@pytest.fixture(scope="module")
def api(caller: Any) -> Iterator[openai.OpenAI]:
    with (
        LiveServer(make_app(caller[0])) as live,
        openai.OpenAI(base_url=live.url + "/v1", api_key="none") as client,
    ):
        yield client


def test_the_format_is_read_from_the_template(caller: Any) -> None:
    llm, are_tokens = caller
    assert format_of(llm.prompts, llm.tokenizer) == ToolFormat("\n", "\n", "\n", are_tokens)


@pytest.mark.parametrize(
    "template",
    [
        QWEN.replace("if tools", "if documents"),  # the functions are not listed
        QWEN.replace("tool_call>", "call>"),
        QWEN.replace('"arguments"', '"parameters"'),
        QWEN.replace("call.arguments | tojson", "'<city>Rome</city>'"),
        QWEN.replace(
            "{%- if tools %}", "{{ raise_exception('no calls') if tools }}{%- if tools %}"
        ),
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
    ids=["unlisted", "other marks", "other keys", "no JSON", "refused", "none"],
)
def test_other_templates_have_no_known_format(template: str, tmp_path: Path) -> None:
    with make_llm(with_template(save_tiny(tmp_path / "tiny"), template)) as llm:
        assert format_of(llm.prompts, llm.tokenizer) is None


def accepts(llm: LLM, grammar: str, text: str | list[int]) -> bool:
    """The grammar allows `text`, or these tokens, as a whole answer."""
    ids = llm.tokenizer(text)["input_ids"] if isinstance(text, str) else text
    form = check_structured_outputs({"grammar": grammar})
    assert form is not None
    compiler = GrammarCompiler(
        llm.tokenizer, llm.engine.limits.vocab_size, [llm.tokenizer.eos_token_id]
    )
    matcher = compiler.compile(form).matcher()
    taken = matcher.try_consume_tokens(ids) if ids else 0
    return bool(taken == len(ids) and matcher.is_accepting())


def test_answers_that_the_grammar_allows(caller: Any) -> None:
    llm, are_tokens = caller
    written = ToolFormat("\n", "\n", "\n", are_tokens)
    call = f"{OPENING}\n{CALL}\n{CLOSING}"
    several = written.grammar(SCHEMA, several=True)
    one = written.grammar(SCHEMA, several=False)
    for text in ("", "Hello", "a <tool> and {1}", call, "I go.\n" + call):
        assert accepts(llm, several, text) and accepts(llm, one, text), text
    assert accepts(llm, several, f"{call}\n{call}") and not accepts(llm, one, f"{call}\n{call}")
    if are_tokens:  # the mark cannot be spelled past the grammar
        letters = [llm.tokenizer(letter)["input_ids"][0] for letter in OPENING]
        assert llm.tokenizer.decode(letters) == OPENING
        assert not accepts(llm, several, letters)
    wrong = (
        OPENING, f"{OPENING}\n{{}}\n{CLOSING}", call.replace("Rome", "Bonn"), call + " and so on",
        call.replace("travel", "fly"), call.replace(": ", ":"), call[: -len(CLOSING)],
    )  # fmt: skip
    for text in wrong:
        assert not accepts(llm, several, text), text


def reference(answer: str) -> tuple[str, list[Any]]:
    """The text and the calls of an answer that is there."""
    text, *blocks = answer.split(OPENING)
    calls = []
    for i, block in enumerate(blocks):
        body, found, behind = block.rpartition(CLOSING)
        if not found or not _is_json(body):
            return text + OPENING + OPENING.join(blocks[i:]), calls
        calls.append(json.loads(body))
        if not calls[1:]:
            text = text.rstrip()
        text += behind.strip()
    return text, calls


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_answers_are_read_in_any_pieces() -> None:
    """Cut wherever: the same text and the same calls as of the answer that is whole."""
    odd = json.dumps({"name": "say", "arguments": {"text": f"a {CLOSING} b"}})
    answers = [
        "", " ", "plain text\n", "a < b <tool", f"{OPENING}\n{CALL}\n{CLOSING}",
        f"Let me see. \n\n{OPENING}{CALL}{CLOSING}\n{OPENING}\n{CALL}\n{CLOSING}\n",
        f"{OPENING}\n{odd}\n{CLOSING}", f"cut {OPENING}\n" + CALL[:20],
    ]  # fmt: skip
    rng = random.Random(1)
    for answer in answers:
        want = reference(answer)
        if answer.startswith("cut"):
            want = ("cut" + answer[4:], [])  # no call: the space in front of it is dropped
        for _ in range(30):
            places = sorted(rng.choices(range(len(answer) + 1), k=rng.randint(0, 12)))
            reader, text, calls = CallReader(), "", []
            for begin, end in zip([0, *places], [*places, len(answer)], strict=True):
                more, found = reader.feed(answer[begin:end])
                text, calls = text + more, calls + found
            text += reader.finish()
            assert (text, calls) == want, (answer, places)


def ask(api: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "temperature": 0,
             "max_tokens": 120}  # fmt: skip
    return api.chat.completions.create(**{**given, **more})


def test_an_answer_of_text_is_what_the_model_says(caller: Any, api: openai.OpenAI) -> None:
    """With functions that it does not call; without functions nothing is different."""
    llm, _ = caller
    turns = [{"role": "user", "content": "go"}]
    prompt, _ = llm.prompts.read_chat(turns, tools=TOOLS)
    assert "travel" in prompt and "Stay at home." in prompt
    silent = {str(llm.tokenizer("<")["input_ids"][0]): -100}
    if caller[1]:
        silent[str(llm.tokenizer(OPENING)["input_ids"][0])] = -100
    whole = ask(api, tools=TOOLS, logit_bias=silent, max_tokens=30).choices[0]
    assert whole.finish_reason in ("stop", "length") and whole.message.tool_calls is None
    parts = list(ask(api, tools=TOOLS, logit_bias=silent, max_tokens=30, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in parts) == whole.message.content
    free = ask(api, max_tokens=30).choices[0].message
    [want] = llm.chat(turns, SamplingParams(max_tokens=30), use_tqdm=False)
    assert free.content == want.outputs[0].text


def spell(llm: LLM, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The model wants every answer to ask() with functions to begin with the letters of `text`."""
    ids = llm.tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    _, prompt = llm.prompts.read_chat([{"role": "user", "content": "go"}], tools=TOOLS)
    forward = llm.model.forward

    def spelled(plan: Any, *more: Any) -> Any:
        scores = forward(plan, *more)
        for row, node in enumerate(plan.logit_rows):
            place = int(plan.positions[node]) + 1 - len(prompt)
            if 0 <= place < len(ids):
                scores[row, ids[place]] += 1000
        llm.model.best_ids = None  # they were of other scores
        return scores

    monkeypatch.setattr(llm.model, "forward", spelled)


def test_an_answer_with_a_call(
    caller: Any, api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, are_tokens = caller
    begins = {}
    if are_tokens:
        begins = {str(llm.tokenizer(OPENING)["input_ids"][0]): 100}
    else:
        spell(llm, monkeypatch, OPENING)
    for more in ({}, {"tool_choice": "auto"}, {"temperature": 1, "seed": 4}):
        choice = ask(api, tools=TOOLS, logit_bias=begins, parallel_tool_calls=False, **more)
        [choice] = choice.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        check(call.function)
        stream = list(ask(api, tools=TOOLS, logit_bias=begins, parallel_tool_calls=False,
                          stream=True, **more))  # fmt: skip
        deltas = [part.choices[0].delta for part in stream if part.choices]
        assert not any(delta.content for delta in deltas)
        [streamed] = [one for delta in deltas for one in delta.tool_calls or []]
        assert streamed.index == 0 and streamed.function == type(streamed.function)(
            name=call.function.name, arguments=call.function.arguments
        )
        assert stream[-1].choices[0].finish_reason == "tool_calls"
    # A call that is cut is text, as is what was held back for it.
    cut = ask(api, tools=TOOLS, logit_bias=begins, max_tokens=9).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls is None
    assert cut.message.content.startswith(f'{OPENING}\n{{"name"'[: len(cut.message.content)])


@pytest.mark.parametrize("caller", [True], ids=["marks are tokens"], indirect=True)
def test_several_calls_in_an_answer(caller: Any, api: openai.OpenAI) -> None:
    """With the mark, and what stands between two calls, preferred wherever they may stand, there is
    one call behind the other, unless that is not wanted."""
    llm, _ = caller
    begins = {str(llm.tokenizer(OPENING)["input_ids"][0]): 100}
    again = {**begins, str(llm.tokenizer("\n")["input_ids"][0]): 90}
    more = {"tools": TOOLS, "logit_bias": again, "max_tokens": 200}
    [one] = ask(api, **more, parallel_tool_calls=False).choices
    assert one.finish_reason == "tool_calls" and len(one.message.tool_calls) == 1
    many = ask(api, **more, n=2, temperature=1, seed=1).choices
    for choice in many:
        assert len(choice.message.tool_calls) > 1
        for call in choice.message.tool_calls:
            check(call.function)
    [one] = ask(api, **more).choices
    parts = list(ask(api, **more, stream=True))
    numbers = [c.index for p in parts for c in p.choices[0].delta.tool_calls or []]
    assert numbers == list(range(len(one.message.tool_calls)))


def check(function: Any) -> None:
    assert function.name in ("travel", "stay")
    arguments = json.loads(function.arguments)
    assert function.name == "stay" or arguments in ({"city": "Rome"}, {"city": "Oslo"})


def test_a_conversation_goes_on_behind_a_call(caller: Any, api: openai.OpenAI) -> None:
    """Earlier calls stand in the prompt as the template writes them."""
    llm, _ = caller
    call = {"id": "call-1", "type": "function",
            "function": {"name": "travel", "arguments": '{"city": "Rome"}'}}  # fmt: skip
    turns: Any = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "done"},
    ]
    answer = ask(api, messages=turns, tools=TOOLS, max_tokens=4)
    given = [
        turns[0],
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "travel", "arguments": {"city": "Rome"}}}
        ]},
        {"role": "tool", "content": "done"},
    ]  # fmt: skip
    text, ids = llm.prompts.read_chat(given, tools=TOOLS)
    assert f"{OPENING}\n{CALL}\n{CLOSING}" in text
    assert answer.usage.prompt_tokens == len(ids)


HISTORY: Any = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call-1", "type": "function",
         "function": {"name": "travel", "arguments": '{"city": "Rome"}'}}]},
    {"role": "tool", "tool_call_id": "call-1", "content": "done"},
]  # fmt: skip


def prompt_of(api: openai.OpenAI, **more: Any) -> list[int]:
    """The prompt of a chat, which /tokenize has to know as well."""
    body = {"messages": HISTORY, "tools": TOOLS, **more}
    whole = ask(api, **body, max_tokens=1, extra_body={"return_token_ids": True})
    told = api._client.post(f"{api.base_url.copy_with(path='/tokenize')}", json=body)
    assert told.status_code == 200 and told.json()["tokens"] == whole.prompt_token_ids
    return list(whole.prompt_token_ids)


def test_calls_of_earlier_answers_keep_the_templates_form(caller: Any, api: openai.OpenAI) -> None:
    """Whatever the next answer may be: they are the tokens that the model has written."""
    llm, _ = caller
    written = f"{OPENING}\n{CALL}\n{CLOSING}"
    named = {"type": "function", "function": {"name": "travel"}}
    for more in (
        {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": "required"},
        {"tool_choice": named}, {"tools": []},
    ):  # fmt: skip
        text = llm.tokenizer.decode(prompt_of(api, **more))
        assert text.count(written) == 1, more
        assert text.count(CALL) == 1


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_calls_without_arguments_and_with_objects(
    caller: Any, api: openai.OpenAI, arguments: Any
) -> None:
    """As vLLM takes them."""
    call = {"type": "function", "function": {"name": "stay", "arguments": arguments}}
    turns = [HISTORY[0], {"role": "assistant", "tool_calls": [call]}]
    text = caller[0].tokenizer.decode(prompt_of(api, messages=turns))
    assert f'{OPENING}\n{{"name": "stay", "arguments": {{}}}}\n{CLOSING}' in text
    call["function"]["arguments"] = {"city": "Rome"}
    text = caller[0].tokenizer.decode(prompt_of(api, messages=turns))
    assert '{"name": "stay", "arguments": {"city": "Rome"}}' in text


def test_templates_that_write_calls(tmp_path: Path) -> None:
    """In a form that is not known here, too: of which no answer can be read."""
    for i, (template, writes) in enumerate(
        (
            (QWEN.replace("tool_call>", "call>"), True),
            (QWEN.replace("message.tool_calls or []", "[]"), False),
            ("{{ raise_exception('no') }}", False),
        )
    ):
        with make_llm(with_template(save_tiny(tmp_path / f"tiny{i}"), template)) as llm:
            assert writes_calls(llm.prompts) is writes
            assert format_of(llm.prompts, llm.tokenizer) is None


def test_what_is_refused(api: openai.OpenAI, tmp_path: Path) -> None:
    endless = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}
    for bad in ({"not": {}}, endless):
        tools = [{"type": "function", "function": {"name": "f", "parameters": bad}}]
        with pytest.raises(openai.BadRequestError) as caught:
            ask(api, tools=tools)
        assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(api, tools=TOOLS, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"


def test_a_prompt_reader_gives_functions_to_the_template(caller: Any) -> None:
    llm, _ = caller
    with pytest.raises(RequestError, match="cannot be rendered"):
        llm.prompts.read_chat([{"role": "user", "content": "x"}], tools=[object()])
