"""POST /v1/responses: OpenAI's newer form of a chat, as far as it is about text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ...config.validate import show
from ...text.outputs import RequestOutput
from ..constraints import constraint
from ..errors import ApiError
from ..replies import Choice, News, content_logprobs, head, metrics, steps_and_sources, usage
from ..schema.responses import ResponsesRequest
from ..serving import serving_of
from ..sse import DONE, HOLE, EventWriter, Template, event, event_stream, unless_gone
from .log import log_answer, log_prompt

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """A response with one message, whole or as server-sent events."""
    serving = serving_of(request)
    model = serving.model_name(body.model)
    form = constraint(
        _checked_text(body.text or {}).get("format"), body.structured_outputs, param="text.format"
    )
    turns = body.turns
    log_prompt(request, turns)
    answer = _Answer(request, body, model)
    start = serving.submit(
        request,
        body,
        [lambda reader: reader.read_chat(turns)],
        max_tokens=body.max_output_tokens,
        logprobs=body.num_logprobs,
        form=form,
    )
    [running] = await unless_gone(request, start)
    if body.stream:
        return event_stream(answer, [running], serving.settings.send_seconds)
    output = await unless_gone(request, running.result())
    log_answer(request, [output])
    return JSONResponse(answer.whole(output, answer.about_new(output.outputs[0])))


def _checked_text(text: dict[str, Any]) -> dict[str, Any]:
    """Raises ApiError for what says more than the form of the answer."""
    for name, value in text.items():
        if name != "format" and (name != "verbosity" or value not in (None, "medium")):
            raise ApiError(
                400, f"text.{name} = {show(value)} is not supported; leave it out",
                param=f"text.{name}"[:120],
            )  # fmt: skip
    return text


class _Answer(EventWriter):
    """How one request wants its answer."""

    def __init__(self, request: Request, body: ResponsesRequest, model: str) -> None:
        self._request = request
        self._serving = serving_of(request)
        self._body = body
        self._logprobs = body.num_logprobs
        base = head("resp", "response", model)
        base["created_at"] = float(base.pop("created"))
        self._base = base
        self._item_id = f"msg-{secrets.token_hex(16)}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._number = 0  # of the next event
        self._told: dict[str, list[Any]] = {}  # about the tokens, in events so far
        self._news: dict[str, list[Any]] = {}  # since the last event
        self._delta: Template | None = None
        self._last: RequestOutput | None = None

    def whole(self, output: RequestOutput, about: Mapping[str, Any]) -> dict[str, Any]:
        """The response that has ended. about  its tokens, as about_new() gives it"""
        choice = output.outputs[0]
        cut = choice.finish_reason == "length"
        counts = usage([output])
        read = {**counts["prompt_tokens_details"], "cache_write_tokens": 0}
        part = {**self._part(choice.text), **about}
        return {
            **self._response("incomplete" if cut else "completed"),
            "completed_at": None if cut else time.time(),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item("incomplete" if cut else "completed", [part])],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": read,
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
            "metrics": metrics([output], self._serving.settings.per_request_metrics),
        }

    def begin(self) -> bytes:
        """The response, its message and the part of that, all of them empty."""
        begun, item = self._response("in_progress"), self._item("in_progress", [])
        return b"".join([
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=self._part("")),
        ])  # fmt: skip

    def news(self, number: int, output: News) -> bytes:
        """New text, and what there is to tell about its tokens."""
        if isinstance(output, RequestOutput):
            self._last = output
        [choice] = output.outputs
        for name, values in self.about_new(choice).items():
            self._news.setdefault(name, []).extend(values)
        if not choice.delta_text and not output.finished:
            return b""
        news, self._news = self._news, {}
        for name, values in news.items():
            self._told.setdefault(name, []).extend(values)
        if not choice.delta_text:
            return b""
        if self._delta is None:
            kind = "response.output_text.delta"
            holes = dict.fromkeys(["delta", *news], HOLE)
            content = {"type": kind, "sequence_number": HOLE, **self._place, **holes}
            self._delta = Template(content, kind)
        self._number += 1
        return self._delta.event(self._number - 1, choice.delta_text, *news.values())

    def end(self) -> bytes:
        """All of it once more, from the part to the response."""
        assert self._last is not None
        log_answer(self._request, [self._last])
        final = self.whole(self._last, self._told)
        [item] = final["output"]
        [part] = item["content"]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return b"".join([
            self._event("response.output_text.done", **self._place, **done),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{final['status']}", response=final),
        ])  # fmt: skip

    def failed(self, error: ApiError) -> bytes:
        """OpenAI's event of an error, which has its fields at the top and, as elsewhere, in
        `error`."""
        body = error.body()["error"]
        named = {name: body[name] for name in ("code", "message", "param")}
        return self._event("error", **named, error=body) + DONE

    def _event(self, kind: str, **content: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **content}, kind)

    def about_new(self, choice: Choice) -> dict[str, list[Any]]:
        """Log-probabilities of the new tokens, and how they came about, as far as asked for."""
        logprobs: list[Any] = []
        if self._logprobs is not None:
            logprobs = content_logprobs(choice, self._logprobs, self._serving.token_bytes)
        tokenizer = self._serving.llm.tokenizer
        return {"logprobs": logprobs, **steps_and_sources(choice, self._body, tokenizer)}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        default = self._serving.settings.default_temperature
        return {
            **self._base,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": default if body.temperature is None else body.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }
