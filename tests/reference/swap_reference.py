"""When copying K/V of a preempted request is cheaper than computing it again, by the definition.

In fractions, and without the step-cost code: T is a list of measured points, a straight line
between them, behind the last the slope over the last four.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

Points = Sequence[tuple[int, Fraction]]

__all__ = ["line", "reading_seconds", "swapping_pays"]


def line(points: Points, rows: Fraction) -> Fraction:
    """The value at `rows`; points [(rows, value)] ascend."""
    if rows <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if rows <= x1:
            return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[max(len(points) - 4, 0)], points[-1]
    return y1 + (y1 - y0) / (x1 - x0) * (rows - x1)


def reading_seconds(
    seconds: Points,
    growth: Points,
    context_len: int,
    scale: tuple[Fraction, Fraction],
    start: int,
    end: int,
    chunk: int,
) -> Fraction:
    """The passes that read tokens start, ..., end - 1, `chunk` rows each and the rest.

    growth   seconds that each token of context more than context_len adds, by rows; []: nothing
    scale    what rows of prompts cost of T, and their context of growth
    """
    total = Fraction(0)
    while start < end:
        rows = min(chunk, end - start)
        more = max(Fraction(0), start + Fraction(rows, 2) - context_len)
        total += scale[0] * line(seconds, Fraction(rows))
        if growth:
            total += scale[1] * more * line(growth, Fraction(rows))
        start += rows
    return total


def swapping_pays(num_bytes: int, bytes_per_second: int, reading: Fraction) -> bool:
    """Out and back in no more time than reading takes."""
    return Fraction(2 * num_bytes, bytes_per_second) <= reading
