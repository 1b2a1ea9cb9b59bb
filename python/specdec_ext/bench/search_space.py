"""What `specdec tune` may choose from: a coarse grid, and the finer one around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..config.limits import MAX_DRAFT_LEN
from ..config.lookahead import LookaheadDecodingConfig, max_draft_len
from ..config.ngram import NGramDecodingConfig

__all__ = ["SPACES", "Point", "Space"]

Point = tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """One method's configurations.

    names   of the axes, as the command's tables call them
    values  what each axis may be, ascending
    coarse  the values of the first search
    """

    method: str
    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    coarse: tuple[tuple[int, ...], ...]

    def draft_len(self, point: Point) -> int:
        """Drafts of one step."""
        return max_draft_len(*point) if self.method == "lookahead" else point[0]

    def config(self, point: Point, **options: Any) -> LookaheadDecodingConfig | NGramDecodingConfig:
        """The configuration of a point."""
        if self.method == "lookahead":
            w, n, g = point
            return LookaheadDecodingConfig(w, n, g, **options)
        length, size = point
        return NGramDecodingConfig(length, size, **options)

    def all_points(self) -> list[Point]:
        """Every configuration within the engine's limit."""
        return [p for p in _grid(self.values) if self.draft_len(p) <= MAX_DRAFT_LEN]

    def coarse_points(self, limit: int = MAX_DRAFT_LEN) -> list[Point]:
        """The first search, short drafts first: what is cheap is known when time runs out."""
        return sorted(
            (point for point in _grid(self.coarse) if self.draft_len(point) <= limit),
            key=lambda point: (self.draft_len(point), point),
        )

    def neighbours(self, point: Point, limit: int = MAX_DRAFT_LEN) -> Iterator[Point]:
        """One step along each axis, downwards first."""
        for axis, values in enumerate(self.values):
            at = values.index(point[axis])
            for index in (at - 1, at + 1):
                if 0 <= index < len(values):
                    near = (*point[:axis], values[index], *point[axis + 1 :])
                    if self.draft_len(near) <= limit:
                        yield near


def _grid(axes: tuple[tuple[int, ...], ...]) -> list[Point]:
    points: list[Point] = [()]
    for values in axes:
        points = [(*point, value) for point in points for value in values]
    return points


SPACES = {
    "lookahead": Space(
        "lookahead",
        ("W", "N", "G"),
        ((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15), (2, 3, 4, 5, 6, 7, 8),
         (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)),
        ((2, 5, 10), (3, 5, 7), (2, 5, 10)),
    ),
    "ngram": Space(
        "ngram",
        ("K", "M"),
        ((1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32), (1, 2, 3, 4, 5, 6, 7, 8)),
        ((2, 4, 8, 16), (1, 2, 3, 5)),
    ),
}  # fmt: skip
