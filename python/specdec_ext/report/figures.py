"""What a plot shows, before it is drawn: figures are data, so that they are tested as data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Bars", "Curves", "Figure", "HeatMap", "Shares", "cumulative", "survival"]


@dataclass(frozen=True)
class Figure(ABC):
    """slug: its name in file names and anchors, unique among the figures of one result file."""

    slug: str
    title: str
    x_label: str
    y_label: str
    note: str = ""

    @abstractmethod
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows with the figure's numbers, for who cannot see it."""


@dataclass(frozen=True)
class Bars(Figure):
    """A group of bars per category; series[name][i] belongs to categories[i], None: not known.

    baseline  a line across at this value
    """

    categories: Sequence[str] = ()
    series: Mapping[str, Sequence[float | None]] | None = None
    baseline: float | None = None

    def table(self) -> tuple[list[str], list[list[str]]]:
        series = self.series or {}
        rows = [
            [category, *(_number(values[i]) for values in series.values())]
            for i, category in enumerate(self.categories)
        ]
        return [self.x_label, *series], rows


@dataclass(frozen=True)
class Curves(Figure):
    """Points (x, y) per series, joined; is_log: the x axis is logarithmic."""

    series: Mapping[str, Sequence[tuple[float, float]]] | None = None
    is_log: bool = False
    baseline: float | None = None

    def table(self) -> tuple[list[str], list[list[str]]]:
        series = {name: dict(points) for name, points in (self.series or {}).items()}
        xs = sorted({x for points in series.values() for x in points})
        rows = [[f"{x:g}", *(_number(points.get(x)) for points in series.values())] for x in xs]
        return [self.x_label, *series], rows


@dataclass(frozen=True)
class Shares(Figure):
    """Values per series, drawn as the share of them that is no larger (an empirical
    distribution)."""

    series: Mapping[str, Sequence[float]] | None = None

    def table(self) -> tuple[list[str], list[list[str]]]:
        series = self.series or {}
        rows = [
            [f"{percent} % at most", *(_number(_at(values, percent)) for values in series.values())]
            for percent in (10, 25, 50, 75, 90, 99)
        ]
        return [self.x_label, *series], rows


@dataclass(frozen=True)
class HeatMap(Figure):
    """values[(row, column)]; cells that are missing stay empty."""

    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    values: Mapping[tuple[str, str], float] | None = None

    def table(self) -> tuple[list[str], list[list[str]]]:
        values = self.values or {}
        rows = [
            [row, *(_number(values.get((row, column))) for column in self.columns)]
            for row in self.rows
        ]
        return [f"{self.y_label} / {self.x_label}", *self.columns], rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points (value, share of values up to it), from 0 to 1."""
    ordered = sorted(values)
    return [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def _at(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def survival(histogram: Sequence[int]) -> list[float]:
    """The share of speculative steps that accepted at least 1, 2, ... drafts, from an acceptance
    histogram."""
    total = sum(histogram)
    return [sum(histogram[depth:]) / total for depth in range(1, len(histogram))] if total else []
