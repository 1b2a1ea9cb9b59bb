"""What a request gives back, shaped as vLLM's RequestOutput and CompletionOutput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CompletionNews",
    "CompletionOutput",
    "Logprob",
    "RequestNews",
    "RequestOutput",
    "StepDraft",
    "StepRecord",
]


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability, and its rank (1 = most probable)."""

    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass(frozen=True)
class StepDraft:
    """A draft that a step verified.

    parent    index, in the step's list, of the draft that it follows; -1: the text's last token
    accepted  the draft was accepted and delivered
    sources   who proposed it: lookup, suffix, prediction, grammar (several where they agree), or
              the method's name ("medusa"); "request": it came with the request
    """

    token_id: int
    parent: int
    accepted: bool
    sources: tuple[str, ...]


@dataclass(frozen=True)
class StepRecord:
    """What one forward pass did for one request.

    begin_ms, end_ms  when the step began and when its result was read, in milliseconds since the
                      request was submitted
    is_prefill        the pass read tokens of the prompt
    num_rows          rows of this request in the pass: prompt tokens, the text's last one, drafts
    token_ids         tokens that the step delivered; the first `num_accepted` were drafts
    drafts            the drafts that it verified, parents first
    """

    begin_ms: float
    end_ms: float
    is_prefill: bool
    num_rows: int
    token_ids: tuple[int, ...]
    num_accepted: int
    drafts: tuple[StepDraft, ...]

    def to_json_dict(self, token_text: Callable[[int], str]) -> dict[str, Any]:
        """What `specdec trace --json` and a server write of it, tokens with their texts."""
        return {
            "begin_ms": self.begin_ms,
            "end_ms": self.end_ms,
            "is_prefill": self.is_prefill,
            "num_rows": self.num_rows,
            "tokens": [
                {"id": token, "text": token_text(token), "from_draft": i < self.num_accepted}
                for i, token in enumerate(self.token_ids)
            ],
            "drafts": [
                {
                    "id": draft.token_id,
                    "text": token_text(draft.token_id),
                    "parent": draft.parent,
                    "accepted": draft.accepted,
                    "sources": list(draft.sources),
                }
                for draft in self.drafts
            ],
        }


@dataclass
class CompletionOutput:
    """One completion. While the request runs, a snapshot of what it has written so far.

    index              number of the output, 0..n - 1
    text, token_ids    the whole output so far, without the prompt
    cumulative_logprob sum of the chosen tokens' log-probabilities, if logprobs were asked for
    logprobs           per token: {token id: Logprob}, if asked for
    finish_reason      None while running, "stop" (end or stop token, stop string), "length",
                       "error" (this request failed; see `error`) or "cancelled"
    stop_reason        the stop string or stop token id that ended it; None for end-of-text
    error              why the request failed; None: it did not
    generation_logits  [tokens, vocabulary] float32 tensor on the model's device, if asked for
                       (return_generation_logits): the model's scores before processors
    spec_decode_metrics  metrics["speculative_decoding"] of this output (docs/metrics.md)
    token_from_draft   per token: True if it was a draft that the model confirmed
    steps              every step of the request, if asked for (return_steps)
    delta_text, delta_token_ids, delta_segments, delta_steps
                       what is new since the previous snapshot of the same stream. A segment is
                       (text, source); the source says who drafted the text ("suffix", "medusa",
                       ...), None: nobody. A finished result of generate() repeats the whole output
                       here.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    generation_logits: Any = field(default=None, repr=False, compare=False)
    spec_decode_metrics: dict[str, Any] | None = field(default=None, repr=False)
    token_from_draft: list[bool] = field(default_factory=list, repr=False)
    steps: list[StepRecord] | None = field(default=None, repr=False)
    delta_text: str = field(default="", repr=False)
    delta_token_ids: list[int] = field(default_factory=list, repr=False)
    delta_segments: list[tuple[str, str | None]] = field(default_factory=list, repr=False)
    delta_steps: list[StepRecord] = field(default_factory=list, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class CompletionNews:
    """What is new in a completion that runs; the names are CompletionOutput's. It costs the same
    however long the text is.

    num_tokens  of all of it
    logprobs    of the new tokens
    """

    index: int
    num_tokens: int
    delta_text: str
    delta_token_ids: list[int]
    delta_segments: list[tuple[str, str | None]]
    delta_steps: list[StepRecord]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """The result of one prompt.

    prompt             the text; None if the prompt was given as token ids
    outputs            SamplingParams.n completions
    finished           all outputs have ended
    metrics            what the request took and how it was drafted (docs/metrics.md)
    num_cached_tokens  prompt tokens whose K/V came from an earlier request (prefix reuse); of the
                       first output, if there are several
    prompt_logprobs    per prompt token: {token id: Logprob}, if asked for; None for the first token
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: dict[str, Any] = field(default_factory=dict, repr=False)
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """The line that `specdec generate --json` writes."""
        out = self.outputs[0]
        line: dict[str, Any] = {
            "prompt": self.prompt,
            "token_ids": out.token_ids,
            "text": out.text,
            "finish_reason": out.finish_reason,
            "stop_reason": out.stop_reason,
            "metrics": self.metrics,
        }
        if "synthetic_acceptance" in self.metrics:
            line["synthetic_acceptance"] = self.metrics["synthetic_acceptance"]
        if out.error is not None:
            line["error"] = out.error
        if out.logprobs is not None:
            line["logprobs"] = [
                {str(t): {"logprob": v.logprob, "rank": v.rank} for t, v in row.items()}
                for row in out.logprobs
            ]
        if self.prompt_logprobs is not None:
            line["prompt_logprobs"] = [
                None
                if row is None
                else {str(t): {"logprob": v.logprob, "rank": v.rank} for t, v in row.items()}
                for row in self.prompt_logprobs
            ]
        if len(self.outputs) > 1:
            line["outputs"] = [
                {
                    "index": o.index,
                    "token_ids": o.token_ids,
                    "text": o.text,
                    "finish_reason": o.finish_reason,
                    "stop_reason": o.stop_reason,
                }
                for o in self.outputs
            ]
        return line


@dataclass(slots=True)
class RequestNews:
    """What is new in a request that runs; the names are RequestOutput's. Of several completions one
    may have ended: it is a CompletionOutput."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionNews | CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    finished: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
