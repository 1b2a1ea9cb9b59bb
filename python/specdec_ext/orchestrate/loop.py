"""The loop that prompt lookup and draft-target share."""

from __future__ import annotations

import dataclasses
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.acceptance import describe, is_lossless
from ..config.validate import show
from ..engine.request_state import RequestState
from ..errors import ConfigError, RequestError, UnsupportedRequestError
from ..request.external_draft import ExternalDraftTokensConfig
from ..request.resolve import ResolvedRequest, stream_seed
from ..request.sampling_params import SamplingParams
from ..request.speculative_config import DRAFTS, Changes
from ..text.detokenizer import DetokenizerFactory

if TYPE_CHECKING:
    from ..text.outputs import RequestOutput
    from .generator import Generator

__all__ = ["ExternalLoop", "Proposer", "Running"]

# Requests without a seed draw from streams of their own, other ones than LLM.generate's.
_UNSEEDED = 0x6F72636865737472
_numbers = itertools.count()


@dataclass
class _Pass:
    """What one call of generate did for one request, in the shape of an executor's StepOutput."""

    sequence: int
    tokens: list[int]
    num_drafts: int
    num_accepted: int
    num_rows: int
    num_cached_tokens: int
    is_prefill: bool
    finish_reason: str | None
    stop_reason: int | None
    error: str | None
    logprobs: list[Any]

    @property
    def steps(self) -> list[tuple[bool, int, int, int, int]]:
        drafts, accepted = self.num_drafts, self.num_accepted
        return [(self.is_prefill, self.num_rows, drafts, accepted, len(self.tokens))]

    @property
    def sources(self) -> list[tuple[int | None, int, int]]:
        return [(None, self.num_drafts, self.num_accepted)] if self.num_drafts else []

    @property
    def token_sources(self) -> list[int | None] | None:
        rest = len(self.tokens) - self.num_accepted
        return [-1] * self.num_accepted + [None] * rest if self.num_accepted else None


class Running:
    """One request of the loop.

    text       prompt and output so far, token ids
    max_len    the text never grows beyond this
    params     of the whole request; `seed` is set unless the request is greedy
    """

    def __init__(
        self,
        llm: Generator,
        prompt: str | None,
        request: ResolvedRequest,
        params: SamplingParams,
        rule: str,
    ) -> None:
        number = next(_numbers)
        if params.seed is None and not params.greedy:
            seed = stream_seed(llm.engine.limits.seed ^ _UNSEEDED, number)
            params = dataclasses.replace(params, seed=seed)
        self.params = params
        self.text = list(request.prompt_token_ids)
        self.prompt_len = len(self.text)
        self.max_len = self.prompt_len + request.max_tokens
        self.pool: Any = None  # a proposer's own
        factory = DetokenizerFactory(llm.tokenizer) if llm.tokenizer is not None else None
        self.state = RequestState(
            request_id=str(number),
            prompt=prompt,
            resolved=request,
            detokenizer=factory.make(params.skip_special_tokens)
            if factory is not None and params.detokenize
            else None,
            token_text=factory.token_text if factory is not None else None,
            on_update=None,
            about={
                "numerics": llm.engine.numerics,
                "model_impl": getattr(llm.model, "impl", "unknown"),
                "acceptance": describe(rule),
                "lossless": params.greedy or is_lossless(rule),
            },
            sources=((), "request"),
        )

    @property
    def finished(self) -> bool:
        return self.state.finished

    @property
    def num_output(self) -> int:
        return len(self.text) - self.prompt_len

    @property
    def room(self) -> int:
        """Drafts that could still be delivered, the model's own last token aside."""
        return self.max_len - len(self.text) - 1

    def call(self, draft: ExternalDraftTokensConfig | None) -> SamplingParams:
        """The parameters of one verification: one pass, ids only."""
        count = 1 if draft is None else len(draft.tokens) + 1
        return dataclasses.replace(
            self.params,
            max_tokens=count,
            min_tokens=min(count, max(0, self.params.min_tokens - self.num_output)),
            stop=None,
            detokenize=False,
            include_stop_str_in_output=False,
            external_draft=draft,
            speculative_config=False,
        )

    def consume(self, output: RequestOutput, num_drafts: int, begin: float) -> None:
        """Take what a verification delivered."""
        one = output.outputs[0]
        metrics = output.metrics
        finish = one.finish_reason
        if finish == "length" and len(self.text) + len(one.token_ids) < self.max_len:
            finish = None  # the call is over, the request is not
        first = self.num_output == 0
        self.text += one.token_ids
        self.state.consume(
            _Pass(
                sequence=self.state.sequence + 1,
                tokens=one.token_ids,
                num_drafts=num_drafts,
                num_accepted=sum(one.token_from_draft),
                num_rows=metrics.get("num_rows", 0),
                num_cached_tokens=output.num_cached_tokens if first else self.cached,
                is_prefill=first,
                finish_reason=finish,
                stop_reason=one.stop_reason if isinstance(one.stop_reason, int) else None,
                error=one.error,
                logprobs=[_raw_logprobs(t, row, self.params.logprobs) for t, row in
                          zip(one.token_ids, one.logprobs or [], strict=False)],
            ),
            begin,
            time.perf_counter(),
            one.generation_logits,
        )  # fmt: skip

    @property
    def cached(self) -> int:
        """Prompt tokens that were cached when the request came."""
        return self.state.num_cached_tokens


def _raw_logprobs(token: int, row: Any, count: int | None) -> tuple[float, int, list[Any]]:
    """A row of CompletionOutput.logprobs as the executor gives it: (chosen, rank, best)."""
    ranked = sorted((entry.rank, token_id, entry.logprob) for token_id, entry in row.items())
    best = [(token_id, logprob) for rank, token_id, logprob in ranked if rank <= (count or 0)]
    return row[token].logprob, row[token].rank, best


class Proposer(ABC):
    """Where the drafts come from."""

    @abstractmethod
    def propose(self, running: Sequence[Running]) -> list[ExternalDraftTokensConfig | None]:
        """Drafts for every request, at most `room` of them; None: none this time."""

    def rule(self, params: SamplingParams) -> str:
        """By which the target accepts the drafts of such a request (config/acceptance.py)."""
        return "exact_match"


def _refuse(params: SamplingParams) -> None:
    """What a request that is cut into many calls cannot have."""
    asked = params.speculative_config
    if not isinstance(asked, bool | None):
        config = asked if isinstance(asked, Changes) else {"speculative_config": asked}
        for name in ("speculative_config", *DRAFTS):
            if name in config:
                raise UnsupportedRequestError(
                    f"SamplingParams.{name} = {show(config[name])}: not in an external loop (the "
                    "loop brings the drafts; give max_draft_len or num_draft_tokens to it); use "
                    "the in-engine form, or leave it out"
                )
    for name, off, why in (
        ("n", 1, "send the prompt n times, with seeds of their own"),
        ("presence_penalty", 0.0, "a later call cannot tell output from prompt"),
        ("frequency_penalty", 0.0, "a later call cannot tell output from prompt"),
        ("external_draft", None, "the loop brings the drafts"),
        ("prediction", None, "the loop brings the drafts"),
        ("acceptance", "exact_match", "the loop chooses it"),
        ("prompt_logprobs", None, "ask for them in a call of their own"),
        ("structured_outputs", None, "each call would begin the form anew"),
        ("return_steps", False, "the loop's calls are steps of their own"),
    ):
        if getattr(params, name) != off:
            raise UnsupportedRequestError(
                f"SamplingParams.{name} = {getattr(params, name)!r}: not in an external loop "
                f"({why}); use the in-engine form, or {name} = {off}"
            )


class ExternalLoop:
    """Verifies a proposer's drafts, call by call, until every request has ended.

    Raises ConfigError for an engine without prefix reuse, RequestError before any work.
    """

    def __init__(
        self,
        llm: Generator,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        proposer: Proposer,
    ) -> None:
        require_reuse(llm)
        items = llm.prompts.read_all(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            params = list(sampling_params)
        if len(params) != len(items):
            raise RequestError(
                f"sampling_params has {len(params)} entries for {len(items)} prompts; give one for "
                "all or one per prompt"
            )
        resolved = []
        for one, (_, ids) in zip(params, items, strict=True):
            _refuse(one)
            resolved.append(llm.engine.resolve(ids, one))
        self._llm = llm
        self._proposer = proposer
        self.requests = [
            Running(llm, text, request, one, proposer.rule(one))
            for (text, _), request, one in zip(items, resolved, params, strict=True)
        ]

    def step(self) -> bool:
        """One iteration for every request that still runs; False: none does."""
        running = [r for r in self.requests if not r.finished]
        if not running:
            return False
        begin = time.perf_counter()
        drafts = self._proposer.propose(running)
        outputs = self._llm.generate(
            [{"prompt_token_ids": r.text} for r in running],
            [r.call(draft) for r, draft in zip(running, drafts, strict=True)],
            use_tqdm=False,
        )
        for request, draft, output in zip(running, drafts, outputs, strict=True):
            request.consume(output, 0 if draft is None else len(draft.tokens), begin)
        return True

    def run(self) -> list[RequestOutput]:
        while self.step():
            pass
        return self.snapshots()

    def stream(self, streaming_interval: int) -> Iterator[list[RequestOutput]]:
        """Snapshots of all requests every few iterations, and at the end."""
        for i in itertools.count(1):
            more = self.step()
            if not more or i % streaming_interval == 0:
                yield self.snapshots()
            if not more:
                return

    def snapshots(self) -> list[RequestOutput]:
        return [request.state.snapshot() for request in self.requests]


def require_reuse(llm: Generator) -> None:
    if not llm.kv_cache_config.enable_block_reuse:
        raise ConfigError(
            "kv_cache_config.enable_block_reuse = False: an external loop would read the whole "
            "text again in every iteration; build the LLM with "
            "kv_cache_config={'enable_block_reuse': True}"
        )
