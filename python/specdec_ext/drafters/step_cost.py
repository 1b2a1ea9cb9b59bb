"""T(rows, context), the time of a forward pass, as drafters weigh their drafts with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["StepCost", "mean_context"]

_SLOPE_POINTS = 4  # the growth behind the last point is that over so many: one of them is noise
_CONTEXT_STEP = 64  # tokens: contexts that differ by less share a table

Floats = np.ndarray[Any, np.dtype[np.float64]]


class HasTokens(Protocol):
    """A request, as far as it matters here."""

    @property
    def tokens(self) -> Sequence[int]: ...


def mean_context(requests: Sequence[HasTokens]) -> float:
    """Tokens in the K/V cache of each request, on average: all but the last one."""
    return sum(len(request.tokens) for request in requests) / max(len(requests), 1) - 1


class StepCost:
    """Seconds of a pass: measured points, linear between them and behind the last.

    table        {rows: seconds}, two points or more. A pass with more rows is not faster: what says
                 so is noise. A pass without rows costs one of the fewest.
    growth       {rows: seconds} that each token of context more adds to a pass of one request;
                 None: nothing does
    context_len  tokens in the cache that `table` was measured with
    """

    def __init__(
        self,
        table: Mapping[int, float],
        growth: Mapping[int, float] | None = None,
        context_len: float = 0.0,
    ) -> None:
        self._points = sorted(table)
        self._growth = StepCost(growth) if growth else None
        self._context_len = context_len
        self._at: tuple[tuple[int, int], StepCost] | None = None
        rows = self._points
        self._seconds = seconds = np.maximum.accumulate([table[count] for count in rows])
        self._last = rows[-1]
        self._table: list[float] = np.interp(np.arange(self._last + 1), rows, seconds).tolist()
        first = max(len(rows) - _SLOPE_POINTS, 0)
        self._slope = float(seconds[-1] - seconds[first]) / (rows[-1] - rows[first])
        self._array = np.array(self._table)

    @classmethod
    def measured(
        cls,
        rows: Sequence[int],
        seconds: Sequence[float],
        context_len: float,
        growth: Sequence[float],
    ) -> StepCost:
        """From columns, as they were measured."""
        table = dict(zip(rows, seconds, strict=True))
        return cls(table, dict(zip(rows, growth, strict=True)), context_len)

    @classmethod
    def of(cls, table: StepCost | Mapping[int, float]) -> StepCost | None:
        """What `table` says; None for one with fewer than two points, which says nothing."""
        if isinstance(table, StepCost):
            return table
        return cls(table) if len(table) >= 2 else None

    def at(self, requests: int, context_len: float) -> StepCost:
        """For steps of `requests` requests with `context_len` tokens in the cache, on average.

        Their rows share the model's weights, but each request's rows read a cache of its own.
        """
        more = int((context_len - self._context_len) // _CONTEXT_STEP)
        if self._growth is None or more <= 0 or requests <= 0:
            return self
        if self._at is None or self._at[0] != (requests, more):
            added = [self._growth.between(count / requests) for count in self._points]
            seconds = self._seconds + requests * more * _CONTEXT_STEP * np.array(added)
            cost = StepCost(dict(zip(self._points, seconds.tolist(), strict=True)))
            self._at = ((requests, more), cost)
        return self._at[1]

    def between(self, rows: float) -> float:
        """Of so many rows, which need not be a whole number."""
        low = int(rows)
        return self(low) + (rows - low) * (self(low + 1) - self(low))

    def __call__(self, rows: int) -> float:
        """Of one pass."""
        if rows <= self._last:
            return self._table[rows]
        return self._table[-1] + (rows - self._last) * self._slope

    def seconds(self, first: int, more: int) -> Floats:
        """[more + 1]: of first, first + 1, ..., first + more rows."""
        rows = np.arange(first, first + more + 1)
        beyond = np.maximum(rows - self._last, 0) * self._slope
        result: Floats = self._array[np.minimum(rows, self._last)] + beyond
        return result
