"""POST /v1/completions: texts or token ids in, their continuations out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ...text.outputs import RequestOutput
from ..bridge import PromptSource, Running
from ..errors import ApiError
from ..replies import (
    Choice,
    News,
    TextOffsets,
    completion_logprobs,
    head,
    is_worth_sending,
    metrics,
    new_logprobs,
    prompt_offsets,
    steps_and_sources,
    usage,
    without_answer,
)
from ..schema.completions import CompletionRequest
from ..serving import serving_of
from ..sse import DONE, HOLE, EventWriter, Template, event, event_stream, unless_gone
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
    answer = _Answer(request, body, model, len(prompts))
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
        return event_stream(answer, running, serving.settings.send_seconds)
    outputs = await unless_gone(request, _all(running))
    if body.scores_prompt:
        outputs = [without_answer(output) for output in outputs]
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


class _Answer(EventWriter):
    """How one request of so many prompts wants its answer."""

    def __init__(
        self, request: Request, body: CompletionRequest, model: str, num_prompts: int
    ) -> None:
        self._request = request
        self._serving = serving_of(request)
        self._body = body
        self._model = model
        self._n = body.n or 1
        self._num_choices = num_prompts * self._n
        self._wants_tokens = bool(
            body.logprobs is not None or body.return_token_ids or body.wants_steps
        )
        self._base: dict[str, Any] = {}  # what all chunks of a stream have
        self._chunk: Template | None = None
        # An event of each choice with text, and tokens if asked for; none: there is more to tell.
        self._plain: list[Template] = []
        self._last: dict[int, News] = {}
        self._begun: set[int] = set()  # choices that have been in an event
        self._offsets: dict[int, TextOffsets] = {}  # of the choices' tokens
        self._ended: set[int] = set()  # choices whose last event has been made

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """A text_completion; each output is its request's only snapshot: all of it is new."""
        result = head("cmpl", "text_completion", self._model)
        result["choices"] = [
            self._choice(number, output, choice, is_first=True)
            for number, output in enumerate(outputs)
            for choice in output.outputs
        ]
        result["usage"] = usage(outputs)
        result["metrics"] = metrics(outputs, self._serving.settings.per_request_metrics)
        return result

    def begin(self) -> bytes:
        """Nothing: text_completion events come with tokens."""
        base = head("cmpl", "text_completion", self._model)
        if self._body.with_usage:
            base["usage"] = None
        self._base = base
        self._chunk = Template({**base, "choices": [HOLE]})
        body = self._body
        if not (
            body.logprobs is not None or body.wants_steps or body.echo or body.usage_in_every_chunk
        ):
            rest = {"text": HOLE, "logprobs": None, "finish_reason": None}
            if body.return_token_ids:
                rest |= {"token_ids": HOLE, "prompt_token_ids": None}
            self._plain = [
                Template({**base, "choices": [{"index": i, **rest}]})
                for i in range(self._num_choices)
            ]
        return b""

    def news(self, number: int, output: News) -> bytes:
        """One event per choice that has something new."""
        if self._body.scores_prompt:
            output = without_answer(output)
        self._last[number] = output
        events = []
        for choice in output.outputs:
            place = number * self._n + choice.index
            has_tokens = bool(choice.delta_token_ids) or choice.finish_reason is not None
            is_first = has_tokens and place not in self._begun  # else a part of the prompt was read
            if place in self._ended or (
                not is_worth_sending(choice, wants_tokens=self._wants_tokens)
                and not (is_first and self._body.echo)
            ):
                continue
            if self._plain and choice.finish_reason is None and not self._wants_tokens:
                events.append(self._plain[place].event(choice.delta_text))
            elif self._plain and choice.finish_reason is None and not is_first:
                events.append(self._plain[place].event(choice.delta_text, choice.delta_token_ids))
            else:
                events.append(self._event(self._choice(number, output, choice, is_first=is_first)))
                if choice.finish_reason is not None:
                    self._ended.add(place)
            if has_tokens:
                self._begun.add(place)
        return events[0] if len(events) == 1 else b"".join(events)

    def end(self) -> bytes:
        outputs = [
            output
            for _, output in sorted(self._last.items())
            if isinstance(output, RequestOutput)  # as all are by now
        ]
        log_answer(self._request, outputs)
        if not self._body.with_usage:
            return DONE
        detail = self._serving.settings.per_request_metrics
        end = {"usage": usage(outputs), "metrics": metrics(outputs, detail)}
        return event({**self._base, "choices": [], **end}) + DONE

    def _event(self, content: dict[str, Any]) -> bytes:
        """The event of one choice, whatever it has."""
        if self._body.usage_in_every_chunk:
            counts = usage(self._last.values())
            return event({**self._base, "usage": counts, "choices": [content]})
        assert self._chunk is not None
        return self._chunk.event(content)

    def _choice(
        self, number: int, output: News, choice: Choice, *, is_first: bool
    ) -> dict[str, Any]:
        """What is new in a choice. is_first  no event had a token of it"""
        prompt = self._prompt_text(output) if self._body.echo and is_first else ""
        place = number * self._n + choice.index
        result: dict[str, Any] = {
            "index": place,
            "text": prompt + choice.delta_text,
            "logprobs": self._logprobs(place, output, choice, prompt, is_first=is_first),
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
        self, place: int, output: News, choice: Choice, prompt: str, *, is_first: bool
    ) -> dict[str, Any] | None:
        """Those of the new tokens, behind the prompt's in the first event with echo."""
        if self._body.logprobs is None:
            return None
        serving = self._serving
        if is_first:
            skip = self._body.skip_special_tokens is not False
            self._offsets[place] = TextOffsets(serving.detokenizer(skip), len(prompt))
        new = new_logprobs(choice, self._offsets.get(place) or TextOffsets(None))
        if not is_first or not self._body.echo or output.prompt_logprobs is None:
            return new
        ids, rows = output.prompt_token_ids, output.prompt_logprobs
        tokenizer = serving.llm.tokenizer
        first = tokenizer.decode(ids[:1]) if tokenizer is not None else ""
        places = prompt_offsets(prompt, ids, serving.detokenizer(False), serving.special_tokens)
        before = completion_logprobs(ids, rows, places, first)
        return {key: before[key] + new[key] for key in new}

    def _prompt_text(self, output: News) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._serving.llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, "echo needs a tokenizer for token ids; leave it out", param="echo")
        text: str = tokenizer.decode(output.prompt_token_ids)
        return text
