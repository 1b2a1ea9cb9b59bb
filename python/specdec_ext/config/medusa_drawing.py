"""A tree of choices as text and as a picture; nodes are shaded by acceptance probability."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from ..errors import ConfigError
from .medusa_choices import Choice

__all__ = ["draw_png", "tree_svg", "tree_text"]

_ROW, _RADIUS, _MARGIN = 64, 11, 24
_LIGHT, _DARK = (239, 243, 255), (8, 81, 156)


def tree_text(choices: Sequence[Choice], probability: Mapping[Choice, float]) -> str:
    """One line per node, children below and right of their parent."""
    children = _children(choices)
    lines = ["golden token"]

    def add(parent: Choice, indent: str) -> None:
        for choice in children.get(parent, ()):
            last = choice == children[parent][-1]
            note = f"  {probability[choice]:.3f}" if choice in probability else ""
            lines.append(f"{indent}{'└─' if last else '├─'} {list(choice)}{note}")
            add(choice, indent + ("   " if last else "│  "))

    add((), "")
    return "\n".join(lines)


def _children(choices: Sequence[Choice]) -> dict[Choice, list[Choice]]:
    children: dict[Choice, list[Choice]] = {}
    for choice in sorted(choices):
        children.setdefault(choice[:-1], []).append(choice)
    return children


def _layout(choices: Sequence[Choice]) -> dict[Choice, tuple[float, float]]:
    """Centre of each node: leaves side by side, parents above; () is the golden token."""
    children = _children(choices)
    place: dict[Choice, tuple[float, float]] = {}
    column = 0

    def put(node: Choice) -> float:
        nonlocal column
        below = children.get(node, ())
        if below:
            xs = [put(child) for child in below]
            x = (xs[0] + xs[-1]) / 2
        else:
            x = _MARGIN + _RADIUS + column * (2.4 * _RADIUS)
            column += 1
        place[node] = (x, _MARGIN + _RADIUS + len(node) * _ROW)
        return x

    put(())
    return place


def _shade(share: float) -> str:
    levels = [round(a + (b - a) * share) for a, b in zip(_LIGHT, _DARK, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*levels)


def _fills(
    choices: Sequence[Choice], probability: Mapping[Choice, float]
) -> dict[Choice, tuple[str, str]]:
    """(fill, text colour) of each node; dark is likely. Without probabilities all are alike."""
    most = max((probability.get(c, 0.0) for c in choices), default=0.0) or 1.0
    result: dict[Choice, tuple[str, str]] = {(): ("#ffd92f", "#000000")}
    for choice in choices:
        share = probability[choice] / most if choice in probability else 0.25
        result[choice] = (_shade(share), "#ffffff" if share > 0.5 else "#000000")
    return result


def tree_svg(choices: Sequence[Choice], probability: Mapping[Choice, float]) -> str:
    """An SVG document; the number in a node is its rank, its title the choice."""
    place, fills = _layout(choices), _fills(choices, probability)
    width = max(x for x, _ in place.values()) + _MARGIN + _RADIUS
    height = max(y for _, y in place.values()) + _MARGIN + _RADIUS
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for choice in choices:
        (x, y), (px, py) = place[choice], place[choice[:-1]]
        lines.append(
            f'<line x1="{px:.1f}" y1="{py:.1f}" x2="{x:.1f}" y2="{y:.1f}" stroke="#999999"/>'
        )
    for node, (x, y) in sorted(place.items()):
        fill, ink = fills[node]
        note = f", accepted {probability[node]:.3f}" if node in probability else ""
        title = f"{list(node)}{note}" if node else "golden token"
        lines.append(
            f'<g><title>{title}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" '
            f'fill="{fill}" stroke="#555555"/><text x="{x:.1f}" y="{y + 4:.1f}" fill="{ink}" '
            f'text-anchor="middle">{node[-1] if node else "g"}</text></g>'
        )
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def draw_png(choices: Sequence[Choice], probability: Mapping[Choice, float]) -> bytes:
    """The same picture as a PNG file. Raises ConfigError when matplotlib is not installed."""
    import importlib

    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError(
            "PNG needs matplotlib; run: pip install matplotlib   (or draw an .svg)"
        ) from None
    place, fills = _layout(choices), _fills(choices, probability)
    width = max(x for x, _ in place.values()) + _MARGIN + _RADIUS
    height = max(y for _, y in place.values()) + _MARGIN + _RADIUS
    figure = figure_module.Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    for choice in choices:
        (x, y), (px, py) = place[choice], place[choice[:-1]]
        axes.plot([px, x], [py, y], color="#999999", linewidth=1, zorder=1)
    for node, (x, y) in place.items():
        fill, ink = fills[node]
        axes.plot([x], [y], "o", ms=2 * _RADIUS, mfc=fill, mec="#555555", zorder=2)
        axes.text(x, y, str(node[-1]) if node else "g", color=ink, ha="center", va="center",
                  fontsize=9, zorder=3)  # fmt: skip
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=144)
    return picture.getvalue()
