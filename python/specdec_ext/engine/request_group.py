"""The outputs of one prompt: one request state per completion (`SamplingParams.n`).

To the executor each output is a separate request with a separate random stream. The group is
what callers hold: it looks like one request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..request.resolve import ResolvedRequest
from ..text.metrics import SpecCounter, ratio
from ..text.outputs import CompletionNews, CompletionOutput, RequestNews, RequestOutput
from .request_state import RequestState

if TYPE_CHECKING:
    from .loop import EngineLoop

__all__ = ["RequestGroup"]


class RequestGroup:
    """The outputs of `request`: `n` requests on one prompt. When it is deleted, what still runs
    is cancelled. Raises QueueFullError before anything is queued. on_update, watched: of each, as
    EngineLoop.submit() takes them."""

    def __init__(
        self,
        engine: EngineLoop,
        request: ResolvedRequest,
        *,
        prompt: str | None = None,
        on_update: Callable[[RequestState], None] | None = None,
        watched: bool = True,
    ) -> None:
        self._engine = engine
        count = request.params.n
        engine.require_room(count)
        self.states: list[RequestState] = []
        try:
            for i in range(count):
                one = request.output(i)
                self.states.append(
                    engine.submit(
                        one, prompt=prompt, on_update=on_update, owner=self, watched=watched
                    )
                )
        except BaseException:
            self.cancel()
            raise

    @property
    def request_id(self) -> str:
        return self.states[0].request_id

    @property
    def finished(self) -> bool:
        return all(state.finished for state in self.states)

    @property
    def version(self) -> int:
        """Grows with every change."""
        if len(self.states) == 1:
            return self.states[0].version
        return sum(state.version for state in self.states)

    @property
    def has_news(self) -> bool:
        """Something changed since the last snapshot."""
        if len(self.states) == 1:
            return self.states[0].has_news
        return any(state.has_news for state in self.states)

    def cancel(self) -> bool:
        """End what still runs; False if all had ended."""
        ended = [self._engine.cancel(state) for state in self.states]
        return any(ended)

    def snapshot(self) -> RequestOutput:
        """The outputs so far; delta fields hold what is new since the last look."""
        if len(self.states) == 1:
            return self.states[0].snapshot()
        return self._joined([state.snapshot() for state in self.states])

    def news(self) -> RequestNews | RequestOutput:
        """What is new since the last look; once all outputs have ended, all of them whole."""
        if len(self.states) == 1:
            return self.states[0].news()
        parts = [state.news() for state in self.states]
        whole = [part for part in parts if isinstance(part, RequestOutput)]
        if len(whole) == len(parts):
            return self._joined(whole)
        outputs: list[CompletionNews | CompletionOutput] = []
        for i, part in enumerate(parts):
            part.outputs[0].index = i
            outputs += part.outputs
        first = parts[0]
        return RequestNews(
            first.prompt,
            first.prompt_token_ids,
            outputs,
            first.num_cached_tokens,
            first.prompt_logprobs,
        )

    def _joined(self, parts: list[RequestOutput]) -> RequestOutput:
        for i, part in enumerate(parts):
            part.outputs[0].index = i
        finished = all(part.finished for part in parts)
        return dataclasses.replace(
            parts[0],
            outputs=[part.outputs[0] for part in parts],
            finished=finished,
            metrics=self._metrics(parts) if finished else {},
        )

    def _metrics(self, parts: list[RequestOutput]) -> dict[str, Any]:
        """Sums over the outputs; times of the first to start and the last to end."""
        total = SpecCounter(0, keep_steps=False)
        for state in self.states:
            total.add(state.counter)
        each = [part.metrics for part in parts]
        result = dict(each[0])
        for name in (
            "num_generated_tokens", "num_cached_tokens", "num_forward_passes",
            "num_prefill_passes", "num_rows",
        ):  # fmt: skip
            result[name] = sum(metrics[name] for metrics in each)
        result["tokens_per_forward_pass"] = ratio(
            result["num_generated_tokens"], result["num_forward_passes"]
        )
        longest = [m["generation_time_ms"] for m in each if m["generation_time_ms"] is not None]
        result["generation_time_ms"] = max(longest, default=None)
        result["tokens_per_second"] = (
            ratio(result["num_generated_tokens"] * 1e3, max(longest)) if longest else None
        )
        if "accepted_prediction_tokens" in result:
            result.update(total.tokens_of("prediction"))
        if "accepted_grammar_tokens" in result:
            result.update(total.tokens_of("grammar"))
        result["draft_sources"] = total.draft_sources
        result["speculative_decoding"] = total.to_dict()
        return result
