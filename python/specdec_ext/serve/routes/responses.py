"""POST /v1/responses: OpenAI's newer form of a chat, as far as it is about text."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ...config.validate import show
from ...text.outputs import CompletionOutput, RequestOutput
from ..bridge import Running
from ..constraints import constraint
from ..errors import ApiError
from ..replies import content_logprobs, head, metrics, steps_and_sources, usage
from ..schema.responses import ResponsesRequest
from ..serving import Serving, serving_of
from ..sse import event, event_stream, unless_gone
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
    answer = _Answer(serving, body, model)
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
        events = answer.events(running, request)
        return event_stream(events, [running], serving.settings.send_seconds)
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


class _Answer:
    """How one request wants its answer."""

    def __init__(self, serving: Serving, body: ResponsesRequest, model: str) -> None:
        self._serving = serving
        self._body = body
        self._logprobs = body.num_logprobs
        base = head("resp", "response", model)
        base["created_at"] = float(base.pop("created"))
        self._base = base
        self._item_id = f"msg-{secrets.token_hex(16)}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def whole(self, output: RequestOutput, about: Mapping[str, Any]) -> dict[str, Any]:
        """The response that has ended. about  its tokens, as about_new() gives it"""
        choice = output.outputs[0]
        cut = choice.finish_reason == "length"
        counts = usage([output])
        read = {**counts["prompt_tokens_details"], "cache_write_tokens": 0}
        part = {**self._part(choice.text), **about}
        return {
            **self._response("incomplete" if cut else "completed"),
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

    async def events(self, running: Running, request: Request) -> AsyncIterator[bytes]:
        """The typed events of a response, numbered."""
        number = -1

        def made(kind: str, **content: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number, **content}, kind)

        begun = self._response("in_progress")
        empty = self._part("")
        yield made("response.created", response=begun)
        yield made("response.in_progress", response=begun)
        yield made("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield made("response.content_part.added", **self._place, part=empty)
        output = None
        told: dict[str, list[Any]] = {}
        news: dict[str, list[Any]] = {}  # since the last event
        async for output in running:
            choice = output.outputs[0]
            for name, values in self.about_new(choice).items():
                news.setdefault(name, []).extend(values)
            if choice.delta_text:
                yield made(
                    "response.output_text.delta", **self._place, delta=choice.delta_text, **news
                )
            if choice.delta_text or output.finished:
                for name, values in news.items():
                    told.setdefault(name, []).extend(values)
                news.clear()
        assert output is not None
        log_answer(request, [output])
        text = output.outputs[0].text
        final = self.whole(output, told)
        yield made("response.output_text.done", **self._place, text=text, logprobs=told["logprobs"])
        yield made(
            "response.content_part.done", **self._place, part=final["output"][0]["content"][0]
        )
        yield made("response.output_item.done", output_index=0, item=final["output"][0])
        yield made(f"response.{final['status']}", response=final)

    def about_new(self, choice: CompletionOutput) -> dict[str, list[Any]]:
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
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": default if body.temperature is None else body.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
