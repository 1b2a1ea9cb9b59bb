"""POST /v1/chat/completions: a conversation in, the next turn out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ...text.outputs import CompletionOutput, RequestOutput
from ..chat_prompt import chat_prompt
from ..constraints import constraint
from ..errors import ApiError
from ..replies import (
    Choice,
    News,
    content_logprobs,
    head,
    is_worth_sending,
    metrics,
    steps_and_sources,
    usage,
)
from ..schema.chat import ChatRequest
from ..schema.tools import AnswerReader, ToolCalls
from ..serving import serving_of
from ..sse import DONE, HOLE, EventWriter, Template, event, event_stream, unless_gone
from .log import log_answer, log_prompt

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """A chat completion, whole or as server-sent events."""
    serving = serving_of(request)
    model = serving.model_name(body.model)
    prompt = await chat_prompt(
        serving,
        body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        several=body.parallel_tool_calls is not False,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    calls = prompt.calls
    form = constraint(body.response_format, body.structured_outputs)
    if calls is not None:
        if form[0] is not None:
            raise ApiError(400, f"{form[1]} and tool_choice both ask for a form", param=form[1])
        form = (calls.form, "tools")
        if calls.listed is not None:
            # The marks of a call may be special tokens; others the form does not allow.
            body = body.model_copy(update={"skip_special_tokens": False})
    log_prompt(request, prompt.turns)
    answer = _Answer(request, body, model, calls)
    start = serving.submit(
        request,
        body,
        [prompt.read],
        max_tokens=body.length,
        logprobs=body.num_logprobs,
        form=form,
    )
    [running] = await unless_gone(request, start)
    if body.stream:
        return event_stream(answer, [running], serving.settings.send_seconds)
    output = await unless_gone(request, running.result())
    log_answer(request, [output])
    return JSONResponse(answer.whole(output))


class _Answer(EventWriter):
    """How one request wants its answer. calls  that it has to be, or may have; None: it is text"""

    def __init__(
        self, request: Request, body: ChatRequest, model: str, calls: ToolCalls | None
    ) -> None:
        self._request = request
        self._serving = serving_of(request)
        self._body = body
        self._model = model
        self._logprobs = body.num_logprobs
        self._wants_tokens = bool(body.logprobs or body.return_token_ids or body.wants_steps)
        self._readers: defaultdict[int, AnswerReader] = defaultdict(
            AnswerReader if calls is None else calls.reader
        )
        self._base: dict[str, Any] = {}  # what all chunks of a stream have
        self._chunk: Template | None = None
        # An event of each choice with text, and tokens if asked for; none: there is more to tell.
        self._plain: list[Template] = []
        self._ended: set[int] = set()  # choices whose last event has been made
        self._has_calls = calls is not None
        self._last: RequestOutput | None = None

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """A chat.completion; `output` is the request's only snapshot, so that all of it is new."""
        result = head("chatcmpl", "chat.completion", self._model)
        result["choices"] = [self._whole_choice(choice) for choice in output.outputs]
        result["usage"] = usage([output])
        result["metrics"] = metrics([output], self._serving.settings.per_request_metrics)
        if self._body.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
        return result

    def begin(self) -> bytes:
        """chat.completion.chunk events with the role."""
        base = head("chatcmpl", "chat.completion.chunk", self._model)
        if self._body.with_usage:
            base["usage"] = None
        self._base = base
        self._chunk = Template({**base, "choices": [HOLE]})
        empty = {"logprobs": None, "finish_reason": None}
        choices = range(self._body.n or 1)
        body = self._body
        if not (body.logprobs or body.wants_steps or body.usage_in_every_chunk or self._has_calls):
            rest = {**empty, **({"token_ids": HOLE} if body.return_token_ids else {})}
            self._plain = [
                Template({**base, "choices": [{"index": i, **rest, "delta": {"content": HOLE}}]})
                for i in choices
            ]
        role = {"role": "assistant", "content": ""}
        return b"".join([self._chunk.event({"index": i, **empty, "delta": role}) for i in choices])

    def news(self, number: int, output: News) -> bytes:
        """One event per choice that has something new."""
        events = []
        for choice in output.outputs:
            if choice.index in self._ended or not is_worth_sending(
                choice, wants_tokens=self._wants_tokens
            ):
                continue
            if self._plain and choice.finish_reason is None and choice.delta_text:
                ids = (choice.delta_token_ids,) if self._wants_tokens else ()
                events.append(self._plain[choice.index].event(*ids, choice.delta_text))
            else:
                events.append(self._event(output, choice))
                if choice.finish_reason is not None:
                    self._ended.add(choice.index)
        if isinstance(output, RequestOutput):
            self._last = output
        return events[0] if len(events) == 1 else b"".join(events)

    def end(self) -> bytes:
        assert self._last is not None
        log_answer(self._request, [self._last])
        if not self._body.with_usage:
            return DONE
        detail = self._serving.settings.per_request_metrics
        last = {"usage": usage([self._last]), "metrics": metrics([self._last], detail)}
        return event({**self._base, "choices": [], **last}) + DONE

    def _event(self, output: News, choice: Choice) -> bytes:
        """The event of one choice, whatever it has; b"": of a call that is not complete."""
        delta = self._delta(choice)
        if not delta and not self._wants_tokens and choice.finish_reason is None:
            return b""
        content = {**self._choice(choice), "delta": delta}
        if self._body.usage_in_every_chunk:
            return event({**self._base, "usage": usage([output]), "choices": [content]})
        assert self._chunk is not None
        return self._chunk.event(content)

    def _whole_choice(self, choice: CompletionOutput) -> dict[str, Any]:
        text, calls = self._readers[choice.index].read(choice.text, choice.finish_reason)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message.update(content=text or None, tool_calls=calls)
        return {**self._choice(choice), "message": message}

    def _delta(self, choice: Choice) -> dict[str, Any]:
        """What is new. A call comes whole, with its end."""
        reader = self._readers[choice.index]
        first = reader.num_calls
        text, calls = reader.read(choice.delta_text, choice.finish_reason)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(calls)]
        return delta

    def _choice(self, choice: Choice) -> dict[str, Any]:
        """A choice but for its text: what is new. Call it once the text has been read."""
        result: dict[str, Any] = {"index": choice.index, "logprobs": None}
        if self._logprobs is not None:
            content = content_logprobs(choice, self._logprobs, self._serving.token_bytes)
            result["logprobs"] = {"content": content, "refusal": None}
        called = choice.finish_reason == "stop" and self._readers[choice.index].num_calls > 0
        result["finish_reason"] = "tool_calls" if called else choice.finish_reason
        if choice.finish_reason is not None:
            result["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            result["token_ids"] = choice.delta_token_ids
        result.update(steps_and_sources(choice, self._body, self._serving.llm.tokenizer))
        return result
