"""Adapts a user's object with propose(history, budget) to the engine's drafter protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..drafter_config import UserDrafterConfig
from ..log import logger
from .base import DraftRequest, Proposal

__all__ = ["UserDrafter"]


class UserDrafter:
    """Calls the user's object once per request and step; a failure costs that request's drafts."""

    name = "user_provided"
    needs_hidden = False

    def __init__(self, config: UserDrafterConfig) -> None:
        self._drafter = config.drafter
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
            return _proposal(answer, budget)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                logger.warning(
                    "the user's drafter failed (%s: %s); the step goes on without drafts, further "
                    "failures are only counted", type(error).__name__, error,
                )  # fmt: skip
            return None


def _proposal(answer: Any, budget: int) -> Proposal | None:
    """A Proposal, tokens, (tokens, parents) or (tokens, parents, probs), cut to the budget."""
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
    ids = [int(token) for token in tokens][:budget]
    links = None if parents is None else [int(parent) for parent in parents][:budget]
    rows = None if probs is None else probs[: len(ids)]
    return Proposal(ids, links, rows, vocab_ids, replacement)
