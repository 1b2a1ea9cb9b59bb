"""What a client gets is what LLM.generate gives, in OpenAI's shapes, whole or in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from servers import make_app, make_llm
from sse_reader import choice_text, chunks, events
from starlette.testclient import TestClient

from specdec_ext import LLM, SamplingParams
from specdec_ext.serve.replies import completion_logprobs, prompt_offsets
from specdec_ext.text.outputs import Logprob

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abcabcabc"}]
PROMPT = "a tree, a tree, a tree"
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SAMPLED = {"temperature": 0.9, "seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
# Fields of a request -> the same in SamplingParams.
WISHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "sampled": (SAMPLED, SAMPLED),
    "seeded default": ({"seed": 5}, {"seed": 5, "temperature": 1.0}),
    "penalties": (
        {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5,
         "repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ),
    "bias": ({"temperature": 0, "logit_bias": {"65": 60}}, {"logit_bias": {65: 60.0}}),
    "plain": ({"temperature": 0, "speculative_config": False}, {"speculative_config": False}),
    "fewer drafts": (
        {"temperature": 0, "speculative_config": {"method": "ngram", "max_draft_len": 2}},
        {"speculative_config": {"max_draft_len": 2}},
    ),
    "several": ({**SAMPLED, "n": 3}, {**SAMPLED, "n": 3}),
    "salted": ({"temperature": 0, "cache_salt": "mine"}, {"cache_salt": "mine"}),
    "lengths": (
        {"temperature": 0, "min_tokens": 5, "ignore_eos": True, "stop_token_ids": [70]},
        {"min_tokens": 5, "ignore_eos": True, "stop_token_ids": [70]},
    ),
    "words": (
        {"temperature": 0, "bad_words": ["8"], "allowed_token_ids": list(range(60, 120))},
        {"bad_words": ["8"], "allowed_token_ids": list(range(60, 120))},
    ),
}  # fmt: skip


def expected(llm: LLM, max_tokens: int, wishes: dict[str, Any], *, chat: bool) -> Any:
    params = SamplingParams(max_tokens=max_tokens, **wishes)
    if chat:
        return llm.chat(MESSAGES, params, use_tqdm=False)[0]
    return llm.generate(PROMPT, params, use_tqdm=False)[0]


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_text_is_that_of_generate(client: TestClient, llm: LLM, path: str, wish: str) -> None:
    asked, params = WISHES[wish]
    chat = "chat" in path
    body = {**asked, "max_tokens": 24, **({"messages": MESSAGES} if chat else {"prompt": PROMPT})}
    output = expected(llm, 24, params, chat=chat)
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    (ChatCompletion if chat else Completion).model_validate(answer)
    for choice, want in zip(answer["choices"], output.outputs, strict=True):
        assert (choice["message"]["content"] if chat else choice["text"]) == want.text
        assert choice["finish_reason"] == want.finish_reason
        assert choice["index"] == want.index
    tokens = sum(len(out.token_ids) for out in output.outputs)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(output.prompt_token_ids)
    assert usage["completion_tokens"] == tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + tokens

    streamed = client.post(
        path, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert streamed.headers["content-type"].startswith("text/event-stream")
    parts = chunks(streamed.text)
    for part in parts:
        # OpenAI's type of a completion does not know the null that its own streams have.
        if chat or all(choice["finish_reason"] for choice in part["choices"]):
            (ChatCompletionChunk if chat else Completion).model_validate(part)
    for want in output.outputs:
        assert choice_text(parts, want.index) == want.text
        ends = [
            choice["finish_reason"]
            for part in parts
            for choice in part["choices"]
            if choice["index"] == want.index and choice["finish_reason"]
        ]
        assert ends == [want.finish_reason]
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == tokens
    assert all(part["usage"] is None for part in parts[:-1])
    assert len({part["id"] for part in parts}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_every_chunk(client: TestClient, path: str) -> None:
    """vLLM's continuous_usage_stats, which GuideLLM sends: tokens so far, all choices together."""
    chat = "chat" in path
    body = {"max_tokens": 24, "seed": 3, "n": 2, "stream": True, "ignore_eos": True,
            "return_token_ids": True, **({"messages": MESSAGES} if chat else {"prompt": PROMPT}),
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    parts = chunks(client.post(path, json=body).text)
    *steps, last = [part for part in parts if part["usage"] is not None]
    assert len(parts) - len(steps) - 1 == (2 if chat else 0)  # the roles, in front of any token
    seen = 0
    for part in steps:
        [choice] = part["choices"]
        seen += len(choice["token_ids"])
        assert part["usage"]["completion_tokens"] >= seen > 0
        assert part["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
    assert seen == last["usage"]["completion_tokens"] == 48
    counts = [part["usage"]["completion_tokens"] for part in steps]
    assert counts == sorted(counts)


def test_a_stop_string_ends_the_text_in_front_of_it(client: TestClient, llm: LLM) -> None:
    whole = expected(llm, 30, {}, chat=False).outputs[0].text
    stop = whole[6:8]
    cut = whole[: whole.index(stop)]
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": [stop, "never there"]}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    parts = chunks(client.post("/v1/completions", json={**body, "stream": True}).text)
    assert choice_text(parts) == cut
    kept = client.post("/v1/completions", json={**body, "include_stop_str_in_output": True})
    assert kept.json()["choices"][0]["text"] == cut + stop


def test_several_prompts_and_forms(client: TestClient, llm: LLM) -> None:
    ids = llm.tokenizer(PROMPT)["input_ids"]
    want = [llm.generate(p, SamplingParams(max_tokens=9), use_tqdm=False)[0] for p in ("ab", "cd")]
    one = llm.generate(PROMPT, SamplingParams(max_tokens=9), use_tqdm=False)[0].outputs[0].text
    body = {"max_tokens": 9, "temperature": 0}

    def texts(prompt: Any) -> list[str]:
        reply = client.post("/v1/completions", json={**body, "prompt": prompt})
        assert [c["index"] for c in reply.json()["choices"]] == list(range(len(prompt)))[: len(
            reply.json()["choices"])]  # fmt: skip
        return [choice["text"] for choice in reply.json()["choices"]]

    assert texts(ids) == [one]
    assert texts([ids, ids]) == [one, one]
    assert texts(["ab", "cd"]) == [output.outputs[0].text for output in want]
    parts = chunks(
        client.post("/v1/completions", json={**body, "prompt": ["ab", "cd"], "stream": True}).text
    )
    assert [choice_text(parts, i) for i in (0, 1)] == [o.outputs[0].text for o in want]


def test_log_probabilities(client: TestClient, llm: LLM) -> None:
    output = expected(llm, 8, {"logprobs": 2}, chat=True).outputs[0]
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "logprobs": True,
            "top_logprobs": 2, "return_token_ids": True}  # fmt: skip
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["token_ids"] == output.token_ids and len(content) == 8
    for entry, token, row in zip(content, output.token_ids, output.logprobs, strict=True):
        assert entry["logprob"] == row[token].logprob
        best = sorted((value.logprob for value in row.values()), reverse=True)[:2]
        assert [top["logprob"] for top in entry["top_logprobs"]] == best
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    parts = chunks(client.post("/v1/chat/completions", json={**body, "stream": True}).text)
    streamed = [
        entry
        for part in parts
        for c in part["choices"]
        if c["logprobs"] is not None
        for entry in c["logprobs"]["content"]
    ]
    assert streamed == content


def test_echo_brings_the_prompt_and_its_log_probabilities(client: TestClient, llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=1)
    output = llm.generate("abcd", params, use_tqdm=False)[0]
    body = {"prompt": "abcd", "max_tokens": 5, "temperature": 0, "logprobs": 1, "echo": True}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "abcd" + output.outputs[0].text
    got = choice["logprobs"]
    assert got["tokens"][:4] == list("abcd") and got["token_logprobs"][0] is None
    want = [row[t].logprob for t, row in zip(output.prompt_token_ids[1:],
                                             output.prompt_logprobs[1:], strict=True)]  # fmt: skip
    assert got["token_logprobs"][1:4] == want
    assert got["text_offset"][:5] == [0, 1, 2, 3, 4]
    parts = chunks(client.post("/v1/completions", json={**body, "stream": True}).text)
    assert choice_text(parts) == choice["text"]
    joined = [v for p in parts for c in p["choices"] for v in c["logprobs"]["token_logprobs"]]
    assert joined == got["token_logprobs"]


def streamed_logprobs(client: TestClient, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text and the log-probabilities of a stream, in one piece."""
    parts = chunks(client.post("/v1/completions", json={**body, "stream": True}).text)
    found = [part["choices"][0]["logprobs"] for part in parts]
    return choice_text(parts), {k: [v for one in found for v in one[k]] for k in found[0]}


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_of_one_character_begin_where_it_does(
    client: TestClient, llm: LLM, echo: bool
) -> None:
    """However they come, and with echo behind a prompt that has such characters, too."""
    words = "a\u00e9\U0001f600b"
    ids = llm.tokenizer(words)["input_ids"]
    places = [0, *[1] * 2, *[2] * 4, 3]
    assert len(ids) == len(places)
    form = {"choice": [words]}
    for prompt, before in ((words, places), (ids, places)):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1, "echo": echo,
                "structured_outputs": form}  # fmt: skip
        [choice] = client.post("/v1/completions", json=body).json()["choices"]
        assert choice["text"] == words * (1 + echo)
        got = choice["logprobs"]
        assert got["text_offset"] == (before + [4 + i for i in places] if echo else places)
        assert streamed_logprobs(client, body) == (choice["text"], got)


def test_tokens_around_a_prompt_are_not_in_its_text() -> None:
    """A tokenizer puts some there; a text may also have them written out."""

    class Spelled:
        def push(self, token_id: int) -> str:
            return {0: "<s>", 1: "ab", 2: "c", 3: ""}[token_id]

    special = {0: "<s>"}
    for text, ids, want in (
        ("abc", [0, 1, 2], [0, 0, 2]),
        ("<s>abc", [0, 1, 2], [0, 3, 5]),
        ("<s>abc", [0, 0, 1, 2, 0], [0, 3, 3, 5, 6]),
        ("a", [1, 2, 2], [0, 1, 1]),  # the tokenizer has read other characters
    ):
        assert prompt_offsets(text, ids, Spelled(), special) == want  # type: ignore[arg-type]
    assert prompt_offsets("", [1, 2], None, {}) == [0, 0]


def test_the_chosen_token_is_in_every_row(client: TestClient, llm: LLM) -> None:
    """Also where it is not among the best: OpenAI's rows have up to one more."""
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 2, "seed": 3, "logprobs": 2,
            "echo": True, "return_token_ids": True}  # fmt: skip
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    params = SamplingParams(max_tokens=24, temperature=2.0, seed=3, logprobs=2, prompt_logprobs=2)
    [want] = llm.generate(PROMPT, params, use_tqdm=False)
    rows = [*(want.prompt_logprobs or ())[1:], *(want.outputs[0].logprobs or ())]
    got = choice["logprobs"]
    sizes = set()
    for token, score, top, row in zip(
        got["tokens"][1:], got["token_logprobs"][1:], got["top_logprobs"][1:], rows, strict=True
    ):
        assert row is not None
        texts = {value.decoded_token for value in row.values()}
        assert set(top) == texts and token in texts
        same = [value.logprob for value in row.values() if value.decoded_token == token]
        assert top[token] == max(same) >= score
        sizes.add(len(row))
    assert sizes == {2, 3}


def test_a_prompt_alone_with_its_scores(client: TestClient, llm: LLM) -> None:
    """max_tokens = 0 with echo, as harnesses that score texts ask: no token is returned, or
    counted."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    [want] = llm.generate("abcd", params, use_tqdm=False)
    body = {"prompt": ["abcd", "abcd"], "max_tokens": 0, "temperature": 0, "logprobs": 1,
            "echo": True, "return_token_ids": True}  # fmt: skip
    answer = client.post("/v1/completions", json=body).json()
    for choice in answer["choices"]:
        assert (choice["text"], choice["token_ids"]) == ("abcd", [])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        got = choice["logprobs"]
        assert got["tokens"] == list("abcd") and got["text_offset"] == [0, 1, 2, 3]
        rows = zip(want.prompt_token_ids[1:], (want.prompt_logprobs or ())[1:], strict=True)
        scores = [row[token].logprob for token, row in rows if row is not None]
        assert got["token_logprobs"] == [None, *scores]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 0)
    body["stream_options"] = {"include_usage": True}
    parts = chunks(client.post("/v1/completions", json={**body, "stream": True}).text)
    for i in (0, 1):
        [part] = [p for p in parts if p["choices"] and p["choices"][0]["index"] == i]
        streamed = part["choices"][0]
        assert (streamed["text"], streamed["finish_reason"]) == ("abcd", "length")
        assert streamed["logprobs"] == answer["choices"][i]["logprobs"]
    assert parts[-1]["usage"]["completion_tokens"] == 0
    plain = client.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 0, "echo": True})
    assert plain.json()["choices"][0]["text"] == "abcd"
    for more, said in (({}, "set echo = true for the prompt"), ({"echo": True, "min_tokens": 2},
                       "min_tokens = 2 is greater")):  # fmt: skip
        reply = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0, **more})
        assert reply.status_code == 400 and said in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_has_the_steps_that_read_the_prompt(tiny_path: Path, path: str) -> None:
    """Those that bring no token, too, with the prompt's scores behind them."""
    text = "a prompt of several chunks, " * 6
    with make_llm(tiny_path, max_num_tokens=16, max_batch_size=4) as llm:
        client = TestClient(make_app(llm), raise_server_exceptions=False)
        body: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "include_steps": True}
        if "chat" in path:
            body |= {"messages": [{"role": "user", "content": text}]}
        else:
            body |= {"prompt": text, "echo": True, "logprobs": 1}
        [want] = client.post(path, json={**body, "cache_salt": "a"}).json()["choices"]
        reply = client.post(path, json={**body, "stream": True, "cache_salt": "b"})
        told = [choice for part in chunks(reply.text) for choice in part["choices"]]
        steps = [without_times(step) for choice in told for step in choice.get("steps", [])]
        assert steps == [without_times(step) for step in want["steps"]]
        assert sum(step["is_prefill"] for step in steps) > 2
        if "chat" not in path:
            assert "".join(choice["text"] for choice in told) == want["text"]
            scores = [v for choice in told for v in choice["logprobs"]["token_logprobs"]]
            assert scores == want["logprobs"]["token_logprobs"]


def test_responses(client: TestClient, llm: LLM) -> None:
    want = expected(llm, 12, {}, chat=True).outputs[0].text
    body = {
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "abcabcabc"}]}],
        "max_output_tokens": 12,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "store": False,
    }
    answer = client.post("/v1/responses", json=body).json()
    response = Response.model_validate(answer)
    assert response.output_text == want and response.status == "incomplete"
    assert response.usage is not None and response.usage.output_tokens == 12
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 12

    found = list(events(client.post("/v1/responses", json={**body, "stream": True}).text))
    parts = [json.loads(data) for _, data in found]
    assert [name for name, _ in found] == [part["type"] for part in parts]
    assert [part["sequence_number"] for part in parts] == list(range(len(parts)))
    deltas = [part for part in parts if part["type"] == "response.output_text.delta"]
    assert "".join(part["delta"] for part in deltas) == want
    last = parts[-1]
    assert last["type"] == "response.incomplete"
    assert Response.model_validate(last["response"]).output_text == want
    assert last["response"]["output"][0]["content"][0]["logprobs"] == logprobs
    for part in parts:
        STREAM_EVENT.validate_python(part)


@pytest.mark.parametrize("tokens", [12, 200])
def test_events_of_a_response_come_in_order(client: TestClient, tokens: int) -> None:
    body = {"input": "abc", "max_output_tokens": tokens, "stream": True, "temperature": 0,
            "structured_outputs": {"choice": ["a tree, a tree, a tree, a tree"]}}  # fmt: skip
    names = [name for name, _ in events(client.post("/v1/responses", json=body).text)]
    first = ["created", "in_progress", "output_item.added", "content_part.added"]
    last = ["output_text.done", "content_part.done", "output_item.done",
            "incomplete" if tokens == 12 else "completed"]  # fmt: skip
    assert names[:4] == [f"response.{name}" for name in first]
    assert names[-4:] == [f"response.{name}" for name in last]
    assert set(names[4:-4]) == {"response.output_text.delta"}


def test_sources_of_tokens(client: TestClient, llm: LLM) -> None:
    """Pieces of one source each; together they are the text, and drafts are where the engine
    accepted some."""
    body = {"prompt": "abab" * 8, "max_tokens": 60, "temperature": 0, "stream": True,
            "include_token_sources": True, "stream_options": {"include_usage": True}}  # fmt: skip
    parts = chunks(client.post("/v1/completions", json=body).text)
    pieces = [
        piece for part in parts for choice in part["choices"] for piece in choice["token_sources"]
    ]
    assert "".join(piece["text"] for piece in pieces) == choice_text(parts)
    accepted = parts[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted > 0
    assert {piece["source"] for piece in pieces} == {"model", "ngram"}
    assert sum(piece["source"] == "ngram" for piece in pieces) <= accepted


def test_steps_of_an_answer(client: TestClient, llm: LLM) -> None:
    """The steps that generate() returns, whole and streamed, at every endpoint; of nobody else."""
    params = SamplingParams(max_tokens=40, return_steps=True)
    text = lambda token: llm.tokenizer.decode([token])  # noqa: E731

    def wanted(output: Any) -> list[Any]:
        records = [step.to_json_dict(text) for step in output.outputs[0].steps]
        return [without_times(record) for record in records]

    [plain] = llm.generate(PROMPT, params, use_tqdm=False)
    [chat] = llm.chat(MESSAGES, params, use_tqdm=False)
    asked = {"temperature": 0, "include_steps": True}
    for path, body, want in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40}, wanted(plain)),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 40}, wanted(chat)),
    ):
        whole = client.post(path, json={**body, **asked, "cache_salt": "a"}).json()
        assert [without_times(step) for step in whole["choices"][0]["steps"]] == want
        assert any(draft["accepted"] for step in want for draft in step["drafts"])
        reply = client.post(path, json={**body, **asked, "stream": True, "cache_salt": "b"})
        steps = [step for part in chunks(reply.text) for choice in part["choices"]
                 for step in choice.get("steps", [])]  # fmt: skip
        assert [without_times(step) for step in steps] == want
        bare = client.post(path, json={**body, "temperature": 0}).json()
        assert "steps" not in bare["choices"][0]
    body = {"input": MESSAGES, "max_output_tokens": 40, **asked}
    part = client.post("/v1/responses", json={**body, "cache_salt": "c"}).json()["output"][0]
    assert [without_times(step) for step in part["content"][0]["steps"]] == wanted(chat)
    reply = client.post("/v1/responses", json={**body, "stream": True, "cache_salt": "d"})
    told = [json.loads(data) for _, data in events(reply.text)]
    last = told[-1]["response"]["output"][0]["content"][0]["steps"]
    assert [without_times(step) for step in last] == wanted(chat)
    pieces = [step for event in told for step in event.get("steps", [])]
    assert pieces == last[: len(pieces)] and len(pieces) >= len(last) - 1


def without_times(step: dict[str, Any]) -> dict[str, Any]:
    """What is the same in every run. Rows of a prompt depend on what is cached of it."""
    left = {k: v for k, v in step.items() if k not in ("begin_ms", "end_ms")}
    return {**left, "num_rows": None} if step["is_prefill"] else left


def test_tokenize_and_back(client: TestClient, llm: LLM) -> None:
    ids = llm.tokenizer(PROMPT)["input_ids"]
    answer = client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == 512 and len(answer["token_strs"]) == len(ids)
    assert answer["token_strs"] == [llm.tokenizer.convert_ids_to_tokens(i) for i in ids]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": PROMPT}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert chat == llm.prompts.read_chat(MESSAGES)[1]
    without = client.post(
        "/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}
    ).json()["tokens"]
    assert without == chat[: len(without)] and len(without) < len(chat)
    again = client.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()
    assert again["tokens"] == ids


def test_models(client: TestClient) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["speculation"]) == ("tiny", "model", "ngram")
    assert (card["dtype"], card["max_model_len"]) == ("float32", 512)
    assert client.get("/v1/models/tiny").json() == card
    missing = client.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert client.get("/version").json().keys() == {"version"}


def test_of_tokens_with_one_text_the_better_one_is_shown() -> None:
    row = {7: Logprob(-2.0, 2, "a"), 5: Logprob(-1.0, 1, "a"), 6: Logprob(-3.0, 3, "b")}
    got = completion_logprobs([7], [row], [0])
    assert got["top_logprobs"] == [{"a": -1.0, "b": -3.0}] and got["token_logprobs"] == [-2.0]
