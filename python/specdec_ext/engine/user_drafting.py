"""Calls a user's drafter for the requests that want drafts, and hands its drafts to the executor.

The drafter sees the requests' tokens and nothing else.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.methods import UserDrafterConfig
from ..drafters import Proposal
from ..log import logger

__all__ = ["UserDrafting"]


@dataclass
class _Request:
    """A request that wants drafts.

    tokens       prompt and output so far
    max_len      the most tokens that the text can have
    draft_limit  the most drafts of a step
    wants_probs  its acceptance rule uses a proposal's probs; otherwise they are ignored
    num_known    number of tokens that are complete (an interrupt may come in between)
    sequence     number of the output that brought the last of them
    """

    number: int
    tokens: list[int]
    max_len: int
    draft_limit: int
    wants_probs: bool
    num_known: int
    sequence: int = 0

    def max_drafts(self, step_limit: int) -> int:
        return min(self.draft_limit, step_limit) if len(self.tokens) + 1 < self.max_len else 0


class UserDrafting:
    """Asks config.drafter for the drafts of each decoding request, and hands them to the executor.

    start() and end() may be called from any thread; propose() and observe() from the stepping
    thread, around each step. What the user's object raises costs that request its drafts.
    """

    def __init__(self, config: UserDrafterConfig, executor: Any, *, vocab_size: int,
                 max_seq_len: int) -> None:  # fmt: skip
        self._drafter = config.drafter
        self._executor = executor
        self._vocab_size, self._max_seq_len = vocab_size, max_seq_len
        self._lock = threading.Lock()  # guards _requests and _ended
        self._requests: dict[int, _Request] = {}
        self._ended: list[int] = []
        self._ready: dict[int, _Request] = {}  # past their prompt, before a step
        self._seconds = 0.0
        self._failures = 0  # calls that raised, or returned nothing usable
        self._refused = 0  # proposals that the executor could not use

    def start(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        submit_kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """A request that wants drafts was submitted."""
        del options  # a user's drafter has none
        count = len(prompt_token_ids)
        by_probs = submit_kwargs.get("acceptance") in ("rejection", "threshold", "best_beam")
        request = _Request(
            number=request_id,
            tokens=list(prompt_token_ids),
            max_len=min(count + submit_kwargs["max_tokens"], self._max_seq_len),
            draft_limit=submit_kwargs["max_draft_len"],
            wants_probs=submit_kwargs["temperature"] > 0 and by_probs,
            num_known=count,
        )
        with self._lock:
            self._requests[request_id] = request

    def end(self, request_id: int) -> None:
        """A request has ended; unknown ids are ignored."""
        with self._lock:
            if request_id in self._requests:
                self._ended.append(request_id)

    def hidden_for(self, plan: Any) -> None:
        """No hidden state is wanted."""

    def propose(self) -> None:
        """Ask for drafts of every decoding request and hand them to the executor."""
        self.drop_ended()
        if self._executor.overlap_depth > 0:
            self._read_ahead()
        limit = self._executor.draft_len_limit()
        ready = list(self._ready.values())
        self._ready.clear()
        begin = time.perf_counter()
        for request in ready:
            budget = request.max_drafts(limit)
            proposal = self._ask(request, budget) if budget > 0 else None
            if proposal is not None:
                self._hand_over(request, proposal)
        self._seconds += time.perf_counter() - begin

    def observe(self, outputs: Iterable[Any]) -> None:
        """Take what the step decided, once."""
        for out in outputs:
            with self._lock:
                request = self._requests.get(out.request_id)
            if request is None or not out.tokens or out.finish_reason is not None:
                continue
            if out.sequence <= request.sequence:
                continue
            request.tokens[request.num_known :] = out.tokens
            self._ready[out.request_id] = request
            known = len(request.tokens)
            request.num_known, request.sequence = known, out.sequence

    def drop_ended(self) -> None:
        """Tell the drafter, if it has end(history), of requests that have ended. From the stepping
        thread only."""
        if not self._ended:
            return
        with self._lock:
            ended = [self._requests.pop(rid) for rid in self._ended if rid in self._requests]
            self._ended.clear()
        end = getattr(self._drafter, "end", None)
        for request in ended:
            self._ready.pop(request.number, None)
            if callable(end):
                try:
                    end(list(request.tokens))
                except Exception as error:
                    self._fail(error)

    def stats(self) -> dict[str, Any]:
        return {
            "name": UserDrafterConfig.method,
            "seconds": self._seconds,
            "failures": self._failures,
            "refused_proposals": self._refused,
            "memory_bytes": 0,
        }

    def _read_ahead(self) -> None:
        """The texts as far as steps have run, where these are delivered later."""
        with self._lock:
            requests = list(self._requests.values())
        self._ready = {}
        for request in requests:
            if not self._executor.decoding(request.number):
                continue
            with contextlib.suppress(ValueError):  # it was cancelled meanwhile
                request.tokens = self._executor.history(request.number)
                self._ready[request.number] = request

    def _ask(self, request: _Request, budget: int) -> Proposal | None:
        try:
            answer = self._drafter.propose(list(request.tokens), budget)
            return _proposal(answer, budget, self._vocab_size)
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            logger.warning(
                "the user's drafter failed (%s: %s); the step continues without its drafts; "
                "further failures are only counted, see get_metrics()['drafter']",
                type(error).__name__, error,
            )  # fmt: skip

    def _hand_over(self, request: _Request, proposal: Proposal) -> None:
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
                request.number,
                list(proposal.tokens),
                None if parents is None else list(parents),
                **probs,
            )
        except (TypeError, ValueError) as error:
            # Cancelled meanwhile, or nothing the executor can use.
            self._refused += 1
            logger.debug("proposal for request %d refused: %s", request.number, error)


def _proposal(answer: Any, budget: int, vocab_size: int) -> Proposal | None:
    """A Proposal, tokens, (tokens, parents) or (tokens, parents, probs), cut to the budget and in
    front of the first draft that is no token or has no parent."""
    parents = probs = None
    vocab_ids, replacement = None, False
    if isinstance(answer, Proposal):
        tokens, parents, probs = answer.tokens, answer.parents, answer.probs
        vocab_ids, replacement = answer.vocab_ids, bool(answer.replacement)
    elif isinstance(answer, tuple) and answer and not isinstance(answer[0], int):
        tokens, *rest = answer
        parents = rest[0] if rest else None
        probs = rest[1] if len(rest) > 1 else None
    else:
        tokens = answer
    if tokens is None or len(tokens) == 0:
        return None
    count = min(len(tokens), budget)
    if parents is not None:
        count = min(count, len(parents))
    ids = [_index(token) for token in tokens[:count]]
    links = None if parents is None else [_index(parent) for parent in parents[:count]]
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size or (links is not None and not -1 <= links[i] < i):
            count = i
            break
    if count == 0:
        raise ValueError(f"its first draft, {tokens[0]!r}, is no token id below {vocab_size}")
    ids, links = ids[:count], None if links is None else links[:count]
    rows = None if probs is None else probs[:count]
    return Proposal(ids, links, rows, vocab_ids, replacement)


def _index(value: Any) -> int:
    """A token or parent as an int, from any integer type; -2, which is neither, for others."""
    try:
        return operator.index(value)
    except TypeError:
        return -2
