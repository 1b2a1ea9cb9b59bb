"""Between the engine's loop and a drafter: who decodes, what was accepted, what is proposed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..log import logger
from .base import Drafter, DraftRequest

__all__ = ["DraftSession"]


class DraftSession:
    """Feeds one drafter and hands its proposals to the executor.

    start() and end() may be called from any thread; propose() and observe() from the stepping
    thread, around each step.
    """

    def __init__(self, drafter: Drafter, executor: Any, *, hidden_size: int, max_seq_len: int):
        self.drafter = drafter
        self._executor = executor
        self._hidden_size = hidden_size
        self._max_seq_len = max_seq_len
        self._lock = threading.Lock()  # guards _requests and _ended
        self._requests: dict[int, DraftRequest] = {}
        self._ended: list[int] = []
        self._ready: dict[int, DraftRequest] = {}  # past their prompt, in front of a step
        self._seconds = 0.0
        self._failures = 0  # propose() calls that raised
        self._refused = 0  # proposals that the executor could not use

    def start(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        submit_kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """A request that wants drafts was submitted."""
        prompt = list(prompt_token_ids)
        request = DraftRequest(
            request_id=request_id,
            tokens=prompt,
            prompt_len=len(prompt),
            max_len=min(len(prompt) + submit_kwargs["max_tokens"], self._max_seq_len),
            draft_limit=submit_kwargs["max_draft_len"],
            options=options,
            temperature=submit_kwargs["temperature"],
            top_k=submit_kwargs["top_k"],
            top_p=submit_kwargs["top_p"],
            min_p=submit_kwargs["min_p"],
            seed=submit_kwargs["seed"],
            wants_probs=submit_kwargs["temperature"] > 0
            and submit_kwargs.get("acceptance") in ("rejection", "threshold", "best_beam"),
            cache_salt=submit_kwargs["cache_salt"],
            num_known=len(prompt),
        )
        with self._lock:
            self._requests[request_id] = request

    def end(self, request_id: int) -> None:
        """A request has ended; unknown ids are ignored."""
        with self._lock:
            if request_id in self._requests:
                self._ended.append(request_id)

    def hidden_for(self, plan: Any) -> torch.Tensor | None:
        """The buffer that the model fills in this step, if the drafter needs it."""
        if not self.drafter.needs_hidden:
            return None
        return torch.empty(
            plan.num_logit_rows,
            self._hidden_size,
            dtype=torch.float32,
            device=getattr(self.drafter, "hidden_device", None),  # None: the host
        )

    def propose(self) -> None:
        """Ask for drafts of every decoding request and hand them to the executor."""
        self.drop_ended()
        if self._executor.overlap_depth > 0:
            self._read_ahead()
        limit = self._executor.draft_len_limit()
        for request in self._ready.values():
            request.step_limit = limit
        requests = [r for r in self._ready.values() if r.max_drafts > 0]
        self._ready.clear()
        if not requests:
            return
        begin = time.perf_counter()
        try:
            proposals = self.drafter.propose(requests)
            for request, proposal in zip(requests, proposals, strict=True):
                request.num_drafted = request.num_accepted = 0
                if proposal is not None and len(proposal.tokens) > 0:
                    self._hand_over(request, proposal)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                logger.warning(
                    "the drafter %r raised %s: %s; this step runs without drafts (further "
                    "failures are only counted, see get_metrics()['drafter'])",
                    self.drafter.name, type(error).__name__, error,
                    exc_info=error,
                )  # fmt: skip
        finally:
            self._seconds += time.perf_counter() - begin

    def _read_ahead(self) -> None:
        """The texts as far as steps have run, where these are delivered later."""
        with self._lock:
            requests = list(self._requests.values())
        self._ready = {}
        for request in requests:
            if self._executor.decoding(request.request_id):
                request.tokens = self._executor.history(request.request_id)
                self._ready[request.request_id] = request

    def observe(self, outputs: Iterable[Any], hidden: torch.Tensor | None) -> None:
        """Take what the step decided, once."""
        for out in outputs:
            with self._lock:
                request = self._requests.get(out.request_id)
            if request is None or not out.tokens or out.finish_reason is not None:
                continue
            if out.sequence <= request.sequence:
                continue
            request.tokens[request.num_known :] = out.tokens
            request.num_drafted = out.num_drafts
            request.num_accepted = out.num_accepted
            if hidden is not None:
                request.hidden = hidden[out.last_logit_row]
            self._ready[out.request_id] = request
            known = len(request.tokens)
            request.num_known, request.sequence = known, out.sequence

    def stats(self) -> dict[str, Any]:
        return {
            "name": self.drafter.name,
            "seconds": self._seconds,
            "failures": self._failures,
            "refused_proposals": self._refused,
            **self.drafter.stats(),
        }

    def _hand_over(self, request: DraftRequest, proposal: Any) -> None:
        parents = proposal.parents
        probs: dict[str, Any] = {}
        if request.wants_probs and proposal.probs is not None:
            probs = {
                "probs": proposal.probs,
                "vocab_ids": proposal.vocab_ids,
                "replacement": proposal.replacement,
            }
        try:
            self._executor.propose(
                request.request_id,
                list(proposal.tokens),
                None if parents is None else list(parents),
                **probs,
            )
        except (TypeError, ValueError) as error:
            # Cancelled meanwhile, or nothing the executor can use.
            self._refused += 1
            logger.debug("proposal for request %d refused: %s", request.request_id, error)

    def drop_ended(self) -> None:
        """Tell the drafter of requests that have ended. From the stepping thread only."""
        if not self._ended:
            return
        with self._lock:
            ended = [self._requests.pop(rid) for rid in self._ended if rid in self._requests]
            self._ended.clear()
        for request in ended:
            self._ready.pop(request.request_id, None)
            try:
                self.drafter.end(request)
            except Exception as error:
                self._failures += 1
                logger.debug("drafter %r: end() raised %s", self.drafter.name, error)
