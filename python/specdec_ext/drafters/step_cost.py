"""T(rows), the time of a forward pass by its rows, as drafters weigh their drafts with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["StepCost"]

_SLOPE_POINTS = 4  # the growth behind the last point is that over so many: one of them is noise


class StepCost:
    """Seconds of a pass: measured points, linear between them and behind the last.

    table  {rows: seconds}, two points or more. A pass with more rows is not faster: what says so is
           noise. A pass without rows costs one of the fewest.
    """

    def __init__(self, table: Mapping[int, float]) -> None:
        rows = sorted(table)
        seconds = np.maximum.accumulate([table[count] for count in rows])
        self._last = rows[-1]
        self._table: list[float] = np.interp(np.arange(self._last + 1), rows, seconds).tolist()
        first = max(len(rows) - _SLOPE_POINTS, 0)
        self._slope = float(seconds[-1] - seconds[first]) / (rows[-1] - rows[first])
        self._array = np.array(self._table)

    def __call__(self, rows: int) -> float:
        """Of one pass."""
        if rows <= self._last:
            return self._table[rows]
        return self._table[-1] + (rows - self._last) * self._slope

    def seconds(self, first: int, more: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[more + 1]: of first, first + 1, ..., first + more rows."""
        rows = np.arange(first, first + more + 1)
        beyond = np.maximum(rows - self._last, 0) * self._slope
        result: np.ndarray[Any, np.dtype[np.float64]] = (
            self._array[np.minimum(rows, self._last)] + beyond
        )
        return result
