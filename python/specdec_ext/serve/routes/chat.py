"""POST /v1/chat/completions: a conversation in, the next turn out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from sse_starlette import ServerSentEvent
from starlette.responses import JSONResponse, Response

from ...text.outputs import CompletionOutput, RequestOutput
from ..bridge import Running
from ..constraints import constraint
from ..errors import ApiError
from ..replies import content_logprobs, head, is_worth_sending, metrics, token_sources, usage
from ..schema.chat import ChatRequest, conversation
from ..schema.tools import ToolCalls
from ..serving import Serving, serving_of
from ..sse import DONE, event, event_stream, unless_gone
from .log import log_answer, log_prompt

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """A chat completion, whole or as server-sent events."""
    serving = serving_of(request)
    model = serving.model_name(body.model)
    turns = conversation(body.messages)
    calls = ToolCalls.of(body.tools, body.tool_choice)
    form = constraint(body.response_format, body.structured_outputs)
    if calls is not None:
        if form[0] is not None:
            raise ApiError(400, f"{form[1]} and tool_choice both ask for a form", param=form[1])
        form = (calls.form, "tools")
        turns = _instructed(turns, calls.instruction)
    add_prompt = body.add_generation_prompt is not False
    log_prompt(request, turns)
    answer = _Answer(serving, body, model, calls is not None)
    start = serving.submit(
        request,
        body,
        [lambda reader: reader.read_chat(turns, None, add_prompt)],
        max_tokens=body.length,
        logprobs=body.num_logprobs,
        form=form,
    )
    [running] = await unless_gone(request, start)
    if body.stream:
        events = answer.events(running, request)
        return event_stream(events, [running], serving.settings.send_seconds)
    output = await unless_gone(request, running.result())
    log_answer(request, [output])
    return JSONResponse(answer.whole(output))


def _instructed(turns: list[dict[str, str]], instruction: str) -> list[dict[str, str]]:
    """The conversation with an instruction in its system turn."""
    first = turns[0] if turns[0]["role"] == "system" else None
    content = instruction if first is None else f"{first['content']}\n\n{instruction}"
    return [{"role": "system", "content": content}, *turns[first is not None :]]


class _Answer:
    """How one request wants its answer; `calls`: it is a call of a function."""

    def __init__(self, serving: Serving, body: ChatRequest, model: str, calls: bool) -> None:
        self._calls = calls
        self._serving = serving
        self._body = body
        self._model = model
        self._logprobs = body.num_logprobs
        self._wants_tokens = bool(
            body.logprobs or body.return_token_ids or body.include_token_sources
        )

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """A chat.completion; `output` is the request's only snapshot, so that all of it is new."""
        result = head("chatcmpl", "chat.completion", self._model)
        result["choices"] = [
            {**self._choice(choice), "message": self._message(choice)} for choice in output.outputs
        ]
        result["usage"] = usage([output])
        result["metrics"] = metrics([output], self._serving.settings.per_request_metrics)
        if self._body.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
        return result

    async def events(self, running: Running, request: Request) -> AsyncIterator[ServerSentEvent]:
        """chat.completion.chunk events: a first one with the role, one per snapshot and choice."""
        base = head("chatcmpl", "chat.completion.chunk", self._model)
        if self._body.with_usage:
            base["usage"] = None

        def chunk(choice: dict[str, Any], delta: dict[str, Any]) -> ServerSentEvent:
            return event({**base, "choices": [{**choice, "delta": delta}]})

        for index in range(self._body.n or 1):
            empty = {"index": index, "logprobs": None, "finish_reason": None}
            yield chunk(empty, {"role": "assistant", "content": ""})
        output = None
        async for output in running:
            if self._body.usage_in_every_chunk:
                base["usage"] = usage([output])
            for choice in output.outputs:
                if is_worth_sending(choice, wants_tokens=self._wants_tokens):
                    delta = self._delta(choice)
                    yield chunk(self._choice(choice), delta)
        assert output is not None
        log_answer(request, [output])
        if self._body.with_usage:
            detail = self._serving.settings.per_request_metrics
            last = {"usage": usage([output]), "metrics": metrics([output], detail)}
            yield event({**base, "choices": [], **last})
        yield DONE

    def _called(self, choice: CompletionOutput) -> list[dict[str, Any]] | None:
        """The calls of an answer that has ended; None: it is text."""
        ended = self._calls and choice.finish_reason == "stop"
        return ToolCalls.read(choice.text) if ended else None

    def _message(self, choice: CompletionOutput) -> dict[str, Any]:
        called = self._called(choice)
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return message if called is None else {**message, "content": None, "tool_calls": called}

    def _delta(self, choice: CompletionOutput) -> dict[str, Any]:
        """What is new. A call comes whole, with the end."""
        if self._calls:
            called = self._called(choice)
            if called is None:
                return {}
            return {"tool_calls": [{"index": i, **call} for i, call in enumerate(called)]}
        return {"content": choice.delta_text} if choice.delta_text else {}

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        """A choice but for its text: what is new."""
        result: dict[str, Any] = {"index": choice.index, "logprobs": None}
        if self._logprobs is not None:
            content = content_logprobs(choice, self._logprobs, self._serving.token_bytes)
            result["logprobs"] = {"content": content, "refusal": None}
        called = self._called(choice) is not None
        result["finish_reason"] = "tool_calls" if called else choice.finish_reason
        if choice.finish_reason is not None:
            result["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            result["token_ids"] = choice.delta_token_ids
        if self._body.include_token_sources:
            result["token_sources"] = token_sources(choice)
        return result
