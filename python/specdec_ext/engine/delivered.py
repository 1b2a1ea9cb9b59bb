"""What a request was given: tokens, who drafted them, text, scores, and what its steps counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..request.resolve import ResolvedRequest
from ..text.answer_text import AnswerText
from ..text.detokenizer import Detokenizer
from ..text.metrics import RequestTimer, SpecCounter
from .step_records import StepRecords
from .token_scores import TokenScores

__all__ = ["Delivered"]


class Delivered:
    """One request's, and how it grows by an output at a time. Its request's lock guards it.

    token_ids  and the source that proposed each as a draft (None: it was not drafted) in `sources`
    text       of the tokens; what could be the beginning of a stop string is held back
    steps      None: nobody wants their records

    Invariant between two changes: len(token_ids) == len(sources) == counter.num_tokens. A change
    that is interrupted is undone by restore() of what save() gave before it.
    """

    def __init__(
        self,
        resolved: ResolvedRequest,
        detokenizer: Detokenizer | None,
        token_text: Callable[[int], str] | None,
        source_names: tuple[tuple[str, ...], str],
        steps: StepRecords | None,
    ) -> None:
        params = resolved.params
        self.token_ids: list[int] = []
        self.sources: list[str | None] = []
        self.text = AnswerText(
            detokenizer, params.stop or (), keeps_stop=params.include_stop_str_in_output
        )
        self.scores = TokenScores(params, resolved.prompt_token_ids, token_text)
        self.counter = SpecCounter(resolved.num_spec_tokens)
        self.steps = steps
        self.timer = RequestTimer()
        self._min_tokens = params.min_tokens
        self._names, self._own = source_names

    def add(self, out: Any, step_start: float, now: float, logits: Any) -> str | None:
        """One output's tokens, scores and counts. The stop string that completed, if one did."""
        tokens: list[int] = out.tokens
        reason = out.finish_reason
        timer = self.timer
        if timer.scheduled is None:
            timer.scheduled = step_start
        scores = self.scores
        if scores.prompt_logprobs is not None:
            scores.add_prompt(out.prompt_logprobs)
        if logits is not None:
            scores.add_logits(len(self.token_ids), logits)
        logprobs = out.logprobs if scores.logprobs is not None else None
        sources = self._names_of(out.token_sources, len(tokens))
        stop, before, delivered = None, len(self.token_ids), len(tokens)
        if self.text.is_wanted or logprobs:
            push, min_tokens = self.text.push, self._min_tokens
            last = delivered - 1 if reason == "stop" else -1
            for i, token in enumerate(tokens):
                if logprobs:
                    scores.add(token, logprobs[i])
                may_stop = before + i + 1 >= min_tokens
                stop = push(token, sources[i], ends=i == last, may_stop=may_stop)
                if stop is not None:
                    delivered = i + 1
                    tokens, sources = tokens[:delivered], sources[:delivered]
                    break
        self.token_ids += tokens
        self.sources += sources
        if reason is not None and stop is None:
            self.text.finish()
        self._count(out, delivered)
        if self.steps is not None:
            begin, end = step_start - timer.arrival, now - timer.arrival
            self.steps.add(out, self.token_ids[before:], begin, end)
        if delivered:
            if timer.first_token is None:
                timer.first_token = now
            timer.last_token = now
        return stop

    def save(self) -> tuple[Any, ...]:
        """Where it stands, for restore()."""
        return (
            len(self.token_ids),
            self.text.save(),
            self.counter.save(),
            self.scores.save(),
            None if self.steps is None else len(self.steps.items),
        )

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Be as it was."""
        tokens, text, counter, scores, steps = saved
        del self.token_ids[tokens:], self.sources[tokens:]
        self.text.restore(text)
        self.counter.restore(counter)
        self.scores.restore(scores, tokens)
        if self.steps is not None:
            del self.steps.items[steps:]

    def _count(self, out: Any, delivered: int) -> None:
        """Count an output's passes and drafts, of which `delivered` tokens are left."""
        counter, left = self.counter, delivered
        for is_prefill, rows, drafts, accepted, count in out.steps:
            brought = count if count < left else left  # a stop string has cut off the rest
            left -= brought
            counter.count(
                drafts=drafts, accepted=accepted if accepted < brought else brought, rows=rows,
                tokens=brought, is_prefill=is_prefill,
            )  # fmt: skip
        for source, proposed, right in out.sources:
            name = self._own if source is None else self._names[source]
            counter.count_source(name, proposed, min(right, delivered))

    def _names_of(self, sources: list[int | None] | None, count: int) -> list[str | None]:
        """Who has drafted each of `count` tokens (StepOutput.token_sources)."""
        if sources is None:
            return [None] * count
        names, own = self._names, self._own
        return [None if s is None else own if s < 0 else names[s] for s in sources]
