"""One request while it runs: tokens, text, stop strings, counters, snapshots.

The stepping thread writes (consume, end), any thread reads (snapshot); a lock per request keeps a
snapshot whole.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .detokenizer import Detokenizer
from .metrics import RequestTimer, SpecCounter, ratio
from .outputs import CompletionOutput, Logprob, RequestOutput
from .request_check import ResolvedRequest
from .sampling_params import SamplingParams
from .stop_strings import StopStrings

__all__ = ["RequestState"]


class RequestState:
    """Everything the engine knows about one request.

    Invariants: `text` + held-back segments == the decoded tokens (cut at a stop string);
    len(token_ids) == counter.num_tokens == len(from_draft); after `finished` nothing changes.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: str | None,
        resolved: ResolvedRequest,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        token_text: Callable[[int], str] | None,
        on_update: Callable[[RequestState], None] | None,
        about: dict[str, Any],
    ) -> None:
        self.request_id = request_id
        self.rid = -1
        self.prompt = prompt
        self.prompt_token_ids = resolved.prompt_token_ids
        self.params = params
        self.draft_options = resolved.draft_options
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        self.token_ids: list[int] = []
        self.from_draft: list[bool] = []
        self.counter = SpecCounter(resolved.num_spec_tokens)
        self.timer = RequestTimer()
        self.on_update = on_update
        self._about = about
        self._detokenizer = detokenizer
        self._token_text = token_text
        self._stops = StopStrings(params.stop or ())
        self._text: list[str] = []  # released pieces
        self._held: deque[tuple[str, bool]] = deque()  # could be cut by a stop string
        self._fresh: list[tuple[str, bool]] = []  # released since the last snapshot
        self._fresh_tokens = 0  # token_ids before this index have been in a snapshot
        self._logprobs: list[dict[int, Logprob]] | None = (
            [] if params.logprobs is not None else None
        )
        # The first token has nothing in front of it.
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] if params.prompt_logprobs is not None else None
        )
        self._cumulative_logprob = 0.0
        self._logits: list[Any] = []  # [tokens of a step, vocabulary] each
        self._version = 0  # changes so far, and how many of them a snapshot has shown
        self._seen = 0
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._version

    @property
    def has_news(self) -> bool:
        """Something changed since the last snapshot."""
        return self._version != self._seen

    def notify(self) -> None:
        if self.on_update is not None:
            self.on_update(self)

    def add_logits(self, rows: Any) -> None:
        """Scores [tokens, vocabulary] of the tokens that the next consume() brings."""
        with self._lock:
            self._logits.append(rows)

    def consume(self, out: Any, step_start: float) -> bool:
        """Take a StepOutput. True if a stop string ended the request here, so that later tokens of
        the step were dropped and the executor has to be told."""
        with self._lock:
            if self.timer.scheduled is None:
                self.timer.scheduled = step_start
            self.num_cached_tokens = out.num_cached_tokens
            tokens: list[int] = out.tokens
            logprobs = out.logprobs if self._logprobs is not None else None
            if self._prompt_logprobs is not None:
                for entry in out.prompt_logprobs:
                    token = self.prompt_token_ids[len(self._prompt_logprobs)]
                    self._prompt_logprobs.append(self._logprob_row(token, entry))
            delivered = 0
            for i, token in enumerate(tokens):
                ends = i == len(tokens) - 1 and out.finish_reason == "stop"
                if logprobs:
                    self._add_logprobs(token, logprobs[i])
                delivered += 1
                if self._add_token(token, i < out.num_accepted, ends):
                    break
            self.counter.count(
                drafts=out.num_drafts,
                accepted=min(out.num_accepted, delivered),
                rows=out.num_rows,
                tokens=delivered,
                is_prefill=out.is_prefill,
            )
            if delivered:
                now = time.perf_counter()
                self.timer.first_token = self.timer.first_token or now
                self.timer.last_token = now
            cut_short = self.finish_reason is not None
            if out.finish_reason is not None and not cut_short:
                if out.finish_reason == "stop":
                    self.stop_reason = out.stop_reason
                self._finish(out.finish_reason, out.error)
            self._version += 1
            # If the executor ended it in this step too, there is nothing left to cancel.
            return cut_short and out.finish_reason is None

    def end(self, reason: str, *, error: str | None = None) -> None:
        """End from outside a step."""
        with self._lock:
            if self.finish_reason is None:
                self._finish(reason, error)
                self._version += 1

    def snapshot(self) -> RequestOutput:
        """The output so far; its delta fields hold what is new since the last snapshot."""
        with self._lock:
            self._seen = self._version
            output = CompletionOutput(
                index=0,
                text=self._joined_text(),
                token_ids=list(self.token_ids),
                cumulative_logprob=self._cumulative_logprob if self._logprobs is not None else None,
                logprobs=list(self._logprobs) if self._logprobs is not None else None,
                finish_reason=self.finish_reason,
                stop_reason=self.stop_reason,
                error=self.error,
                generation_logits=self._joined_logits(),
                token_from_draft=list(self.from_draft),
                delta_text="".join(text for text, _ in self._fresh),
                delta_token_ids=self.token_ids[self._fresh_tokens :],
                delta_segments=self._fresh,
            )
            self._fresh = []
            self._fresh_tokens = len(self.token_ids)
            metrics: dict[str, Any] = {}
            if self.finished:
                metrics = self._metrics()
                output.spec_decode_metrics = metrics["speculative_decoding"]
            return RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt,
                prompt_token_ids=self.prompt_token_ids,
                outputs=[output],
                finished=self.finished,
                metrics=metrics,
                prompt_logprobs=None
                if self._prompt_logprobs is None
                else list(self._prompt_logprobs),
                num_cached_tokens=self.num_cached_tokens,
            )

    def _joined_text(self) -> str:
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def _joined_logits(self) -> Any:
        """[tokens, vocabulary], or None. Rows behind a stop string go as their tokens do."""
        if not self._logits:
            return None
        if len(self._logits) > 1:
            rows = self._logits[0].new_empty(
                sum(len(part) for part in self._logits), self._logits[0].shape[1]
            )
            begin = 0
            for part in self._logits:
                rows[begin : begin + len(part)] = part
                begin += len(part)
            self._logits = [rows]
        return self._logits[0][: len(self.token_ids)]

    def _metrics(self) -> dict[str, Any]:
        num_tokens = len(self.token_ids)
        return {
            **self._about,
            "num_prompt_tokens": len(self.prompt_token_ids),
            "num_cached_tokens": self.num_cached_tokens,
            "num_generated_tokens": num_tokens,
            "num_forward_passes": self.counter.num_steps,
            "num_prefill_passes": self.counter.num_prefill_steps,
            "num_rows": self.counter.num_rows,
            "tokens_per_forward_pass": ratio(num_tokens, self.counter.num_steps),
            **self.timer.to_dict(num_tokens),
            "speculative_decoding": self.counter.to_dict(),
        }

    def _add_token(self, token: int, from_draft: bool, ends: bool) -> bool:
        """True if a stop string completed."""
        self.token_ids.append(token)
        self.from_draft.append(from_draft)
        if self._detokenizer is None:
            return False
        # The text of the end or stop token is not part of the answer, unless asked for.
        if ends and not self.params.include_stop_str_in_output:
            return False
        return self._add_text(self._detokenizer.push(token), from_draft)

    def _add_text(self, piece: str, from_draft: bool) -> bool:
        if not piece:
            return False
        if not self.params.stop:
            self._release(piece, from_draft)
            return False
        may_stop = len(self.token_ids) >= self.params.min_tokens
        found = self._stops.feed(piece, may_stop=may_stop)
        if found is None:
            self._held.append((piece, from_draft))
            self._release_held(keep=self._stops.held_chars)
            return False
        end, stop = found
        self._held.append((piece[:end], from_draft))
        self._release_held(keep=0 if self.params.include_stop_str_in_output else len(stop))
        self._held.clear()
        self.stop_reason = stop
        self._finish("stop", None)
        return True

    def _release(self, text: str, from_draft: bool) -> None:
        self._text.append(text)
        self._fresh.append((text, from_draft))

    def _release_held(self, keep: int) -> None:
        """Release held text but its last `keep` characters."""
        count = sum(len(text) for text, _ in self._held) - keep
        while count > 0:
            text, from_draft = self._held.popleft()
            if len(text) > count:
                self._held.appendleft((text[count:], from_draft))
                text = text[:count]
            self._release(text, from_draft)
            count -= len(text)

    def _finish(self, reason: str, error: str | None) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            self.error = error
            self.timer.finished = time.perf_counter()
            if self._detokenizer is not None and self.stop_reason not in (self.params.stop or ()):
                tail = self._detokenizer.finish()
                if tail:
                    self._held.append((tail, False))
            if self._held and not isinstance(self.stop_reason, str):
                self._release_held(keep=0)

    def _logprob_row(self, token: int, entry: Any) -> dict[int, Logprob]:
        chosen, rank, best = entry
        text = self._token_text

        def make(token_id: int, logprob: float, token_rank: int) -> Logprob:
            return Logprob(logprob, token_rank, text(token_id) if text is not None else None)

        row = {token: make(token, chosen, rank)}
        for i, (token_id, logprob) in enumerate(best):
            row.setdefault(token_id, make(token_id, logprob, i + 1))
        return row

    def _add_logprobs(self, token: int, entry: Any) -> None:
        assert self._logprobs is not None
        self._logprobs.append(self._logprob_row(token, entry))
        self._cumulative_logprob += entry[0]
