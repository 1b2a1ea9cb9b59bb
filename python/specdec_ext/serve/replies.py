"""Pieces of answers that the endpoints share: usage, metrics, log-probabilities, token sources."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from ..text.detokenizer import Detokenizer
from ..text.outputs import CompletionNews, CompletionOutput, Logprob, RequestNews, RequestOutput
from .schema.common import Sampled

__all__ = [
    "Choice",
    "News",
    "TextOffsets",
    "TokenBytes",
    "completion_logprobs",
    "content_logprobs",
    "head",
    "is_worth_sending",
    "metrics",
    "new_logprobs",
    "prompt_offsets",
    "steps_and_sources",
    "usage",
    "without_answer",
]

# What is new in a request that runs, and all of one that has ended, have the fields that are used
# here.
Choice = CompletionNews | CompletionOutput
News = RequestNews | RequestOutput

# Bytes of a token; None: the tokenizer has no bytes of single tokens.
TokenBytes = Callable[[int], bytes | None]

PREDICTION = ("accepted_prediction_tokens", "rejected_prediction_tokens")
PER_STEP = ("per_step_accepted", "per_step_drafted")


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What every object of an answer begins with; the id cannot be guessed."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(outputs: Iterable[News]) -> dict[str, Any]:
    """Tokens that were read and delivered, of all prompts and choices; where the request carried a
    prediction, what became of its tokens."""
    given = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in given)
    completion = sum(choice.num_tokens for output in given for choice in output.outputs)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in given)},
    }
    # There in the metrics of requests with a prediction alone.
    if given and all(PREDICTION[0] in output.metrics for output in given):
        counts["completion_tokens_details"] = {
            name: sum(output.metrics[name] for output in given) for name in PREDICTION
        }
    return counts


def metrics(outputs: Sequence[RequestOutput], detail: str) -> dict[str, Any] | None:
    """`metrics` of an answer in vLLM's keys (docs/metrics.md); None with several prompts, or where
    the operator wants none.

    detail  ServerSettings.per_request_metrics
    """
    if detail == "none" or len(outputs) != 1:
        return None
    result = dict(outputs[0].metrics)
    if detail == "summary":
        spec = result["speculative_decoding"]
        result["speculative_decoding"] = {k: v for k, v in spec.items() if k not in PER_STEP}
    return result


def steps_and_sources(choice: Choice, asked: Sampled, tokenizer: Any) -> dict[str, Any]:
    """How what is new came about, as far as the request asks for it:

    token_sources  its text in pieces of one source each: who has drafted it, or "model"
    steps          StepRecord.to_json_dict() of every step
    """

    def text(token: int) -> str:
        return "" if tokenizer is None else str(tokenizer.decode([token]))

    result: dict[str, Any] = {}
    if asked.include_token_sources:
        result["token_sources"] = [
            {"text": piece, "source": source or "model"} for piece, source in choice.delta_segments
        ]
    if asked.include_steps:
        result["steps"] = [step.to_json_dict(text) for step in choice.delta_steps]
    return result


def is_worth_sending(choice: Choice, *, wants_tokens: bool) -> bool:
    """A client sees something new: text, the end, or tokens and steps that it wants to know of."""
    return bool(
        choice.delta_text
        or choice.finish_reason is not None
        or (wants_tokens and (choice.delta_token_ids or choice.delta_steps))
    )


def _new_rows(choice: Choice) -> list[dict[int, Logprob]]:
    rows = choice.logprobs or []
    return rows[len(rows) - len(choice.delta_token_ids) :]


def _text(token_id: int, value: Logprob) -> str:
    return value.decoded_token if value.decoded_token is not None else f"token_id:{token_id}"


def _ranked(row: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    """A row from the best on: the best tokens, and the chosen one."""
    return sorted(row.items(), key=lambda item: item[1].rank or 0)


def content_logprobs(choice: Choice, count: int, token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """`logprobs.content` of the new tokens, with the `count` best of each."""

    def entry(token_id: int, value: Logprob) -> dict[str, Any]:
        content = token_bytes(token_id)
        return {
            "token": _text(token_id, value),
            "logprob": value.logprob,
            "bytes": list(content) if content is not None else None,
        }

    return [
        {
            **entry(token_id, row[token_id]),
            "top_logprobs": [entry(t, value) for t, value in _ranked(row)[:count]],
        }
        for token_id, row in zip(choice.delta_token_ids, _new_rows(choice), strict=True)
    ]


class TextOffsets:
    """Where the tokens of one text begin in it: in characters, as tokens come.

    A token of a character that others complete begins where the character does. So it does not
    matter to a token's place how many come at once.
    """

    def __init__(self, detokenizer: Detokenizer | None, offset: int = 0) -> None:
        """detokenizer  of these tokens; None: there is no text
        offset       characters in front of the first token; `end`: of the next one"""
        self._detokenizer = detokenizer
        self.end = offset

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """The places of the next tokens."""
        places = []
        for token_id in token_ids:
            places.append(self.end)
            if self._detokenizer is not None:
                self.end += len(self._detokenizer.push(token_id))
        return places


def prompt_offsets(
    text: str, token_ids: Sequence[int], detokenizer: Detokenizer | None, special: Mapping[int, str]
) -> list[int]:
    """Where the tokens of a prompt begin in its text.

    detokenizer  of these tokens, special ones too; None: there is no text
    special      the texts of special tokens: a tokenizer may have put some around the text, which
                 are not in it
    """
    offsets = TextOffsets(detokenizer)
    places = []
    for token_id in token_ids:
        place = min(offsets.end, len(text))
        places.append(place)
        if text.startswith(special.get(token_id, ""), place):
            offsets.of([token_id])
    return places


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[Mapping[int, Logprob] | None],
    offsets: Sequence[int],
    first: str = "",
) -> dict[str, Any]:
    """`logprobs` of /v1/completions: of each token, the best ones and, where it is none of them,
    itself.

    rows     of the tokens; None: there is nothing in front of that token
    offsets  where the tokens begin in the text, in characters
    first    the text of a token without a row
    """
    result: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": list(offsets),
    }  # fmt: skip
    for token_id, row in zip(token_ids, rows, strict=True):
        text, logprob = first, None
        best: dict[str, float] | None = None
        if row is not None:
            text, logprob = _text(token_id, row[token_id]), row[token_id].logprob
            best = {}
            for t, value in _ranked(row):  # of tokens with the same text the better one
                best.setdefault(_text(t, value), value.logprob)
        result["tokens"].append(text)
        result["token_logprobs"].append(logprob)
        result["top_logprobs"].append(best)
    return result


def new_logprobs(choice: Choice, offsets: TextOffsets) -> dict[str, Any]:
    """completion_logprobs() of the new tokens."""
    ids = choice.delta_token_ids
    return completion_logprobs(ids, _new_rows(choice), offsets.of(ids))


@overload
def without_answer(output: RequestOutput) -> RequestOutput: ...
@overload
def without_answer(output: RequestNews) -> RequestNews: ...
def without_answer(output: News) -> News:
    """A prompt's output as if nothing had been written behind it. The tokens that were are left in
    its metrics."""
    if isinstance(output, RequestOutput):
        whole: list[CompletionOutput] = [
            CompletionOutput(
                index=choice.index,
                text="",
                token_ids=[],
                logprobs=None if choice.logprobs is None else [],
                finish_reason="length",
            )
            for choice in output.outputs
        ]
        return replace(output, outputs=whole)
    news: list[CompletionNews | CompletionOutput] = [
        CompletionNews(choice.index, 0, "", [], [], [], None if choice.logprobs is None else [])
        for choice in output.outputs
    ]
    return replace(output, outputs=news)
