"""What drafters weigh their drafts with: the core's T(rows, context) and the contexts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .._core import StepCost, cut_drafts

__all__ = ["StepCost", "cut_drafts", "mean_context"]


class HasTokens(Protocol):
    """A request, as far as it matters here."""

    @property
    def tokens(self) -> Sequence[int]: ...


def mean_context(requests: Sequence[HasTokens]) -> float:
    """Tokens in the K/V cache of each request, on average: all but the last one."""
    return sum(len(request.tokens) for request in requests) / max(len(requests), 1) - 1
