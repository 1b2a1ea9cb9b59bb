"""POST /v1/completions: texts or token ids in, their continuations out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ...text.outputs import CompletionOutput, RequestOutput
from ..bridge import PromptSource, Running
from ..errors import ApiError
from ..replies import (
    completion_logprobs,
    head,
    is_worth_sending,
    metrics,
    new_logprobs,
    steps_and_sources,
    usage,
)
from ..schema.completions import CompletionRequest
from ..serving import Serving, serving_of
from ..sse import DONE, Chunks, event, event_stream, merged, unless_gone
from .log import log_answer, log_prompt

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Completions of one prompt or several, whole or as server-sent events."""
    serving = serving_of(request)
    model = serving.model_name(body.model)
    body.check()
    prompts = body.prompts
    log_prompt(request, prompts)
    answer = _Answer(serving, body, model)
    start = serving.submit(
        request,
        body,
        [_source(prompt) for prompt in prompts],
        max_tokens=body.length,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    running = await unless_gone(request, start)
    if body.stream:
        events = answer.events(running, request)
        return event_stream(events, running, serving.settings.send_seconds)
    outputs = await unless_gone(request, _all(running))
    log_answer(request, outputs)
    return JSONResponse(answer.whole(outputs))


def _source(prompt: Any) -> PromptSource:
    return lambda reader: reader.read(prompt)


async def _all(running: Sequence[Running]) -> list[RequestOutput]:
    """The results in order; when one fails the others are cancelled."""
    try:
        return [await one.result() for one in running]
    finally:
        for one in running:
            one.close()


class _Answer:
    """How one request wants its answer."""

    def __init__(self, serving: Serving, body: CompletionRequest, model: str) -> None:
        self._serving = serving
        self._body = body
        self._model = model
        self._n = body.n or 1
        self._wants_tokens = bool(
            body.logprobs is not None or body.return_token_ids or body.wants_steps
        )

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """A text_completion; each output is its request's only snapshot: all of it is new."""
        result = head("cmpl", "text_completion", self._model)
        result["choices"] = [
            self._choice(number, output, choice, "")
            for number, output in enumerate(outputs)
            for choice in output.outputs
        ]
        result["usage"] = usage(outputs)
        result["metrics"] = metrics(outputs, self._serving.settings.per_request_metrics)
        return result

    async def events(self, running: Sequence[Running], request: Request) -> AsyncIterator[bytes]:
        """text_completion events, one per snapshot and choice that has something new."""
        base = head("cmpl", "text_completion", self._model)
        if self._body.with_usage:
            base["usage"] = None
        chunks, with_counts = Chunks(base), self._body.usage_in_every_chunk
        last: dict[int, RequestOutput] = {}
        sent: dict[int, str] = {}  # text of the choices so far
        async for number, output in merged(running):
            last[number] = output
            if with_counts:
                chunks = Chunks({**base, "usage": usage(last.values())})
            for choice in output.outputs:
                place = number * self._n + choice.index
                is_first = place not in sent
                if is_worth_sending(choice, wants_tokens=self._wants_tokens) or (
                    is_first and self._body.echo
                ):
                    part = self._choice(number, output, choice, sent.get(place))
                    yield chunks.event(part)
                    sent[place] = choice.text
        outputs = [last[number] for number in range(len(running))]
        log_answer(request, outputs)
        if self._body.with_usage:
            detail = self._serving.settings.per_request_metrics
            end = {"usage": usage(outputs), "metrics": metrics(outputs, detail)}
            yield event({**base, "choices": [], **end})
        yield DONE

    def _choice(
        self, number: int, output: RequestOutput, choice: CompletionOutput, sent: str | None
    ) -> dict[str, Any]:
        """What is new in a choice. `sent`: its text before that; None or "" at its beginning."""
        prompt = self._prompt_text(output) if self._body.echo else ""
        is_first = not sent
        result: dict[str, Any] = {
            "index": number * self._n + choice.index,
            "text": (prompt if is_first else "") + choice.delta_text,
            "logprobs": self._logprobs(output, choice, prompt, sent or ""),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            result["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            result["token_ids"] = choice.delta_token_ids
            result["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        result.update(steps_and_sources(choice, self._body, self._serving.llm.tokenizer))
        return result

    def _logprobs(
        self, output: RequestOutput, choice: CompletionOutput, prompt: str, sent: str
    ) -> dict[str, Any] | None:
        count = self._body.logprobs
        if count is None:
            return None
        new = new_logprobs(choice, count, len(prompt) + len(sent))
        if sent or not self._body.echo or output.prompt_logprobs is None:
            return new
        ids, rows = output.prompt_token_ids, output.prompt_logprobs
        tokenizer = self._serving.llm.tokenizer
        first = tokenizer.decode(ids[:1]) if tokenizer is not None else ""
        before = completion_logprobs(ids, rows, count, 0, first)
        return {key: before[key] + new[key] for key in new}

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._serving.llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, "echo needs a tokenizer for token ids; leave it out", param="echo")
        text: str = tokenizer.decode(output.prompt_token_ids)
        return text
