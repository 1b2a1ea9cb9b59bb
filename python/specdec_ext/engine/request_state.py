"""One request while it runs: tokens, text, stop strings, counters, snapshots.

The stepping thread writes (consume, end) and any thread reads (snapshot); a lock per request keeps
a snapshot consistent. Ctrl-C may strike between any two calls: a change is undone unless its last
line has run, and that line stores several values without a call in between.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..log import logger
from ..request.resolve import ResolvedRequest
from ..text.detokenizer import Detokenizer
from ..text.metrics import SpecCounter, ratio
from ..text.outputs import CompletionNews, CompletionOutput, RequestNews, RequestOutput
from .delivered import Delivered
from .step_records import StepRecords

__all__ = ["OUTPUTS_AT_ONCE", "Owner", "RequestState"]


# If no caller watches a request step by step, its outputs are added to its text this many at a
# time, or when a caller looks; the executor holds them until then.
OUTPUTS_AT_ONCE = 32


class Owner(weakref.ref[Any]):
    """A reference to a request's owner; when the owner dies, the request is cancelled."""

    rid = -1  # the executor's id of the request, once it has one


class RequestState:
    """Everything the engine knows about one request.

    Except while an output waits, the text that is out and what is held back are the decoded tokens,
    cut at a stop string. After `finished` nothing changes.

    held  the executor's held(id, sequence number), which returns what it still holds of a request
          after that number; None: the executor delivers each output by itself
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: str | None,
        resolved: ResolvedRequest,
        detokenizer: Detokenizer | None,
        token_text: Callable[[int], str] | None,
        on_update: Callable[[RequestState], None] | None,
        about: dict[str, Any],
        sources: tuple[tuple[str, ...], str],
        owner: Owner | None = None,
        steps: StepRecords | None = None,
        held: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.rid = -1
        self.prompt = prompt
        self.prompt_token_ids = resolved.prompt_token_ids
        self.params = params = resolved.params
        self.draft_options = resolved.draft_options
        # (finish_reason, stop_reason, error), set together.
        self._ending: tuple[str | None, int | str | None, str | None] = (None, None, None)
        self._num_cached_tokens = 0
        self._given = Delivered(resolved, detokenizer, token_text, sources, steps)
        self.timer = self._given.timer
        self.on_update = on_update
        self.owner = owner
        self._update_failures = 0
        self._about = about
        self._shown = (0, 0, 0)  # pieces, tokens and steps that have been in a snapshot
        self._held = held
        # Step outputs that are not in the text yet: (its number, out, when its step began, when it
        # was read, scores). A request that a stop string may end takes each output at once, and so
        # does one whose outputs the executor has held; others take several at a time.
        self._waiting: list[tuple[int, Any, float, float, Any]] = []
        at_once = params.stop or held is not None
        self._most_waiting = 1 if at_once else OUTPUTS_AT_ONCE
        self._sequence = 0  # of the last one that is
        self._undo: tuple[Any, ...] | None = None  # where a change began that has not ended
        self._version = 0  # changes so far, and how many of them a snapshot has shown
        self._seen = 0
        self._lock = threading.Lock()

    @property
    def token_ids(self) -> list[int]:
        """What was delivered so far."""
        with self._lock:
            self._look()
            return self._given.token_ids

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose K/V came from an earlier request."""
        with self._lock:
            self._look()
            return self._num_cached_tokens

    @property
    def counter(self) -> SpecCounter:
        """Its steps so far."""
        with self._lock:
            self._look()
            return self._given.counter

    @property
    def finish_reason(self) -> str | None:
        return self._ending[0]

    @property
    def stop_reason(self) -> int | str | None:
        return self._ending[1]

    @property
    def error(self) -> str | None:
        return self._ending[2]

    @property
    def finished(self) -> bool:
        return self._ending[0] is not None

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._version + len(self._waiting)

    @property
    def sequence(self) -> int:
        """The sequence number of the last StepOutput that was taken."""
        return self._waiting[-1][0] if self._waiting else self._sequence

    @property
    def has_news(self) -> bool:
        """Something changed since the last snapshot."""
        return self.version != self._seen

    def notify(self) -> None:
        """Call on_update; an exception of it is logged and changes nothing."""
        if self.on_update is None:
            return
        try:
            self.on_update(self)
        except Exception as error:
            self._update_failures += 1
            if self._update_failures == 1:
                logger.warning(
                    "on_update of request %s raised %s: %s; the request goes on",
                    self.request_id, type(error).__name__, error,
                    exc_info=error,
                )  # fmt: skip

    def consume(self, out: Any, step_start: float, now: float, logits: Any = None) -> bool:
        """Take a StepOutput, unless it was taken before. True: the request has ended.

        step_start, now  when its step began and when it was read, seconds of time.perf_counter
        logits           scores [tokens, vocabulary] of its tokens; None: not asked for
        """
        with self._lock:
            if self._ending[0] is not None:
                return True
            waiting = self._waiting
            taken = waiting[-1][0] if waiting else self._sequence
            if out.sequence > taken:
                if self._held is not None:  # somebody may have looked at some of it
                    out = out.since(taken)
                waiting.append((out.sequence, out, step_start, now, logits))
            if waiting and (
                len(waiting) >= self._most_waiting or waiting[-1][1].finish_reason is not None
            ):
                self._fold()
            return self._ending[0] is not None

    def end(self, reason: str, *, error: str | None = None) -> None:
        """End from outside a step."""
        with self._lock:
            self._look()
            if self.finish_reason is None:
                self._begin()
                try:
                    self._given.text.finish()
                except Exception as failure:  # what was held back is lost, the request ends
                    logger.error("text of request %s: %s", self.request_id, failure)
                    self._begin()
                self._commit(reason, None, error)

    def snapshot(self) -> RequestOutput:
        """The output so far; its delta fields hold what is new since the last look."""
        with self._lock:
            self._look()
            return self._whole()

    def news(self) -> RequestNews | RequestOutput:
        """What is new since the last look; of a request that has ended the whole output."""
        with self._lock:
            self._look()
            if self._ending[0] is not None:
                return self._whole()
            pieces, tokens, steps = self._shown
            given = self._given
            fresh, token_ids, scores = given.text.pieces[pieces:], given.token_ids, given.scores
            records = [] if given.steps is None else given.steps.items
            logprobs = scores.logprobs
            one = CompletionNews(
                0,
                len(token_ids),
                _text_of(fresh),
                token_ids[tokens:],
                fresh,
                records[steps:],
                None if logprobs is None else logprobs[tokens:],
            )
            found = RequestNews(
                self.prompt,
                self.prompt_token_ids,
                [one],
                self._num_cached_tokens,
                scores.prompt_logprobs,
            )
            shown = (pieces + len(fresh), len(token_ids), len(records))
            self._shown, self._seen = shown, self._version
            return found

    def _whole(self) -> RequestOutput:
        """snapshot() of what has been brought in."""
        pieces, tokens, steps = self._shown
        given = self._given
        fresh = given.text.pieces[pieces:]
        records = [] if given.steps is None else given.steps.items
        scores, count = given.scores, len(given.token_ids)
        output = CompletionOutput(
            index=0,
            text=given.text.joined(),
            token_ids=list(given.token_ids),
            cumulative_logprob=None if scores.logprobs is None else scores.cumulative,
            logprobs=None if scores.logprobs is None else list(scores.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            generation_logits=scores.logits(count),
            token_from_draft=[source is not None for source in given.sources],
            steps=None if given.steps is None else list(records),
            delta_text=_text_of(fresh),
            delta_token_ids=given.token_ids[tokens:],
            delta_segments=fresh,
            delta_steps=records[steps:],
        )
        metrics: dict[str, Any] = {}
        if self.finished:
            metrics = self._metrics()
            output.spec_decode_metrics = metrics["speculative_decoding"]
        prompt_logprobs = scores.prompt_logprobs
        whole = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[output],
            finished=self.finished,
            metrics=metrics,
            prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
            num_cached_tokens=self._num_cached_tokens,
        )
        shown = (len(given.text.pieces), len(given.token_ids), len(records))
        self._shown, self._seen = shown, self._version
        return whole

    def _look(self) -> None:
        """Somebody looks: bring everything in that there is by now."""
        if self._held is not None and self._ending[0] is None:
            out = self._held(self.rid, self.sequence)
            if out is not None:
                now = time.perf_counter()
                self._waiting.append((out.sequence, out, now, now, None))
        self._fold()

    def _fold(self) -> None:
        """Bring what was taken into the text. Interrupted, it has not begun."""
        if self._undo is not None:
            self._rewind()
        if not self._waiting:
            return
        self._begin()
        stop = None
        try:
            for _, out, step_start, now, logits in self._waiting:
                stop = self._given.add(out, step_start, now, logits)
                if stop is not None:  # what the step brought after it is dropped
                    break
        except Exception as error:  # the caller's tokenizer, say: this request's, and no other's
            message = f"text of the answer failed: {type(error).__name__}: {error}"
            logger.error("request %s: %s", self.request_id, message, exc_info=error)
            self._begin()
            self._commit("error", None, message)
            return
        self._num_cached_tokens = out.num_cached_tokens
        if stop is not None:
            self._commit("stop", stop, None)
            return
        reason = out.finish_reason  # none but the last one has any
        self._commit(reason, out.stop_reason if reason == "stop" else None, out.error)

    def _begin(self) -> None:
        """Begin a change; one that was interrupted has not been made."""
        if self._undo is not None:
            self._rewind()
        self._undo = self._given.save()

    def _rewind(self) -> None:
        """Undo the change that was interrupted."""
        assert self._undo is not None
        self._given.restore(self._undo)
        self._undo = None

    def _commit(self, reason: str | None, stop_reason: int | str | None, error: str | None) -> None:
        """End a change, which brought in what waited or ended the request from outside."""
        if reason is not None:
            self.timer.finished = time.perf_counter()
        waiting = self._waiting
        sequence = waiting[-1][0] if waiting else self._sequence
        end, version = (reason, stop_reason, error), self._version + (len(waiting) or 1)
        self._undo, self._waiting, self._sequence, self._version, self._ending = (
            None, [], sequence, version, end,
        )  # fmt: skip

    def _metrics(self) -> dict[str, Any]:
        given = self._given
        num_tokens, counter = len(given.token_ids), given.counter
        sources: dict[str, int] = {}
        if self.params.prediction is not None:
            sources |= counter.tokens_of("prediction")
        if self.params.structured_outputs is not None:
            sources |= counter.tokens_of("grammar")
        return {
            **self._about,
            "num_prompt_tokens": len(self.prompt_token_ids),
            "num_cached_tokens": self._num_cached_tokens,
            "num_generated_tokens": num_tokens,
            "num_forward_passes": counter.num_steps,
            "num_prefill_passes": counter.num_prefill_steps,
            "num_rows": counter.num_rows,
            "tokens_per_forward_pass": ratio(num_tokens, counter.num_steps),
            **self.timer.to_dict(num_tokens),
            **sources,
            "draft_sources": counter.draft_sources,
            "speculative_decoding": counter.to_dict(),
        }


def _text_of(pieces: list[tuple[str, str | None]]) -> str:
    return pieces[0][0] if len(pieces) == 1 else "".join([text for text, _ in pieces])
