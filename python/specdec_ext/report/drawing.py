"""Figures as SVG, by matplotlib: text stays text, ids are unique in a page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from .figures import Bars, Curves, Figure, HeatMap, Shares, cumulative

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found,unused-ignore]

__all__ = ["to_svg"]

# Okabe and Ito's colours, which colour-blind readers tell apart; markers say the same again.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specdec",
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
}


def to_svg(figure: Figure, prefix: str) -> str:
    """An <svg> element with title and description; `prefix` makes its ids unique in a page."""
    with _axes() as (picture, axes):
        _draw(axes, figure)
        axes.set_xlabel(figure.x_label)
        axes.set_ylabel(figure.y_label)
        picture.tight_layout()
        buffer = io.StringIO()
        picture.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    svg = text[text.index("<svg") :].rstrip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', lambda m: f"{m[1]}{prefix}-", svg)
    start, rest = svg.split(">", 1)
    label = f"{prefix}-title"
    title = f'<title id="{label}">{escape(figure.title)}</title>'
    return f'{start} role="img" aria-labelledby="{label}">{title}{rest}'


@contextmanager
def _axes() -> Iterator[tuple[Any, Any]]:
    import matplotlib  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.backends.backend_svg import (  # type: ignore[import-not-found,unused-ignore]
        FigureCanvasSVG,
    )
    from matplotlib.figure import (  # type: ignore[import-not-found,unused-ignore]
        Figure as Picture,
    )

    with matplotlib.rc_context(_STYLE):
        picture = Picture(figsize=(7.2, 3.8))
        FigureCanvasSVG(picture)
        yield picture, picture.add_subplot()


def _draw(axes: Axes, figure: Figure) -> None:
    if isinstance(figure, Bars):
        _draw_bars(axes, figure)
    elif isinstance(figure, HeatMap):
        _draw_heat_map(axes, figure)
    elif isinstance(figure, Shares):
        _draw_curves(axes, {n: cumulative(v) for n, v in (figure.series or {}).items()}, True)
        axes.set_ylim(0, 1.03)
    elif isinstance(figure, Curves):
        if figure.is_log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        _draw_curves(axes, dict(figure.series or {}), False)
        axes.set_ylim(bottom=0)
        if figure.baseline is not None:
            axes.axhline(figure.baseline, color="#555555", linestyle="--", linewidth=1)


def _draw_bars(axes: Axes, figure: Bars) -> None:
    series = figure.series or {}
    width = 0.8 / max(1, len(series))
    for s, (name, values) in enumerate(series.items()):
        known = [(i, value) for i, value in enumerate(values) if value is not None]
        axes.bar(
            [i - 0.4 + width * (s + 0.5) for i, _ in known],
            [value for _, value in known],
            width=width * 0.92,
            label=name,
            color=_COLORS[s % len(_COLORS)],
            hatch="//" if s >= len(_COLORS) else None,
        )
    if figure.baseline is not None:
        axes.axhline(figure.baseline, color="#555555", linestyle="--", linewidth=1)
    _name_categories(axes, figure.categories)
    axes.grid(axis="x", visible=False)
    _legend(axes, len(series))


def _name_categories(axes: Axes, names: Sequence[str]) -> None:
    turned = sum(map(len, names)) > 28
    axes.set_xticks(
        range(len(names)), names, rotation=20 if turned else 0, ha="right" if turned else "center"
    )


def _draw_curves(axes: Axes, series: dict[str, Sequence[tuple[float, float]]], steps: bool) -> None:
    for s, (name, points) in enumerate(series.items()):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=_COLORS[s % len(_COLORS)],
            marker=_MARKERS[s % len(_MARKERS)],
            markersize=4,
            linewidth=1.4,
            linestyle="-" if s < len(_COLORS) else ":",
            drawstyle="steps-post" if steps else "default",
        )
    _legend(axes, len(series))


def _legend(axes: Axes, count: int) -> None:
    if count > 1:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    elif count == 1:
        axes.legend(fontsize=8, frameon=False)


def _draw_heat_map(axes: Axes, figure: HeatMap) -> None:
    values = figure.values or {}
    grid = [[values.get((r, c), float("nan")) for c in figure.columns] for r in figure.rows]
    # As paths: a picture in the picture would be a second source to load.
    axes.pcolormesh(grid, cmap="cividis", edgecolors="white", linewidth=1)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xticks([i + 0.5 for i in range(len(figure.columns))], figure.columns)
    axes.set_yticks([i + 0.5 for i in range(len(figure.rows))], figure.rows)
    low, high = min(values.values()), max(values.values())
    for (row, column), value in values.items():
        dark = (value - low) < 0.5 * (high - low)
        axes.text(
            figure.columns.index(column) + 0.5, figure.rows.index(row) + 0.5, f"{value:.2f}",
            ha="center", va="center", fontsize=8, color="white" if dark else "black",
        )  # fmt: skip
