"""Adapts a user's object with propose(history, budget) to the engine's drafter protocol."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.methods import UserDrafterConfig
from ..log import logger
from .base import DraftRequest, Proposal

__all__ = ["UserDrafter"]


class UserDrafter:
    """Calls the user's object once per request and step; a failure costs that request's drafts."""

    name = "user_provided"
    needs_hidden = False

    def __init__(self, config: UserDrafterConfig, vocab_size: int) -> None:
        self._drafter = config.drafter
        self._vocab_size = vocab_size
        self._failures = 0

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal | None]:
        """See Drafter."""
        return [self._propose(request) for request in requests]

    def end(self, request: DraftRequest) -> None:
        """See Drafter; forwarded if the user's object has end(history)."""
        end = getattr(self._drafter, "end", None)
        if callable(end):
            end(list(request.tokens))

    def stats(self) -> Mapping[str, Any]:
        """See Drafter."""
        return {"memory_bytes": 0, "user_failures": self._failures}

    def _propose(self, request: DraftRequest) -> Proposal | None:
        budget = request.max_drafts
        try:
            answer = self._drafter.propose(list(request.tokens), budget)
            return _proposal(answer, budget, self._vocab_size)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                logger.warning(
                    "the user's drafter failed (%s: %s); the step continues without drafts; "
                    "further failures are only counted", type(error).__name__, error,
                )  # fmt: skip
            return None


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
    """An integer, whoever made it; what is none is no token and no parent."""
    try:
        return operator.index(value)
    except TypeError:
        return -2
