"""Result files as one page of HTML that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .._version import __version__
from .drawing import to_svg
from .figures import Figure
from .read import Result

__all__ = ["render_page", "render_pictures"]

# All that a page may do; a browser shows nothing else even if a file's texts held it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: #1a1a1a; background: #fff;
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; }
.note { font-weight: 400; color: #555; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
dl { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: .5rem 0; font-size: .9rem; }
dl div { display: flex; gap: .35rem; } dt { color: #555; } dd { margin: 0; }
details { overflow-x: auto; } summary { cursor: pointer; color: #555; font-size: .85rem; }
"""
_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{ policy|safe }}">
<title>{{ title }}</title>
<style>{{ style|safe }}</style>
</head>
<body>
<h1>{{ title }}</h1>
{{ body|safe }}
{% for part in parts %}
<section aria-labelledby="{{ part.anchor }}">
<h2 id="{{ part.anchor }}">{{ part.name }}</h2>
<dl><div><dt>written by</dt><dd>{{ part.writer }}</dd></div>
{% for word, value in part.facts %}<div><dt>{{ word }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
{% for plot in part.plots %}
<figure id="{{ plot.anchor }}" data-figure="{{ plot.slug }}">
<figcaption>{{ plot.title }}{% if plot.note %} <span class="note">({{ plot.note }})</span>{% endif %}</figcaption>
{{ plot.svg|safe }}
<details><summary>the numbers</summary>
<table><thead><tr>{% for cell in plot.header %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in plot.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></details>
</figure>
{% else %}
<p>This file has nothing that is plotted.</p>
{% endfor %}
</section>
{% endfor %}
<footer class="note">specdec_ext {{ version }}</footer>
</body>
</html>
"""  # noqa: E501


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _parts(results: Sequence[Result]) -> list[dict[str, Any]]:
    parts = []
    for number, result in enumerate(results, 1):
        prefix = f"f{number}-{_anchor(result.name)}"
        plots = []
        for figure in result.figures:
            anchor = f"{prefix}-{_anchor(figure.slug)}"
            header, rows = figure.table()
            plots.append({
                "anchor": anchor, "slug": figure.slug, "title": figure.title, "note": figure.note,
                "svg": to_svg(figure, anchor), "header": header, "rows": rows,
            })  # fmt: skip
        parts.append({"anchor": prefix, "name": result.name, "writer": result.writer,
                      "facts": result.facts, "plots": plots})  # fmt: skip
    return parts


def render_page(
    title: str, results: Sequence[Result], *, body: str = "", more_style: str = ""
) -> str:
    """The page of these results.

    body        HTML between the heading and the figures
    more_style  CSS of it
    """
    from jinja2 import Environment

    # What is marked safe is made here: matplotlib escapes the texts of a picture.
    template = Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE)
    return template.render(
        title=title, policy=POLICY, style=STYLE + more_style, body=body, parts=_parts(results),
        version=__version__,
    )  # fmt: skip


def render_pictures(results: Sequence[Result]) -> dict[str, str]:
    """Every figure as an SVG file's text, by file name."""
    pictures: dict[str, str] = {}
    for result in results:
        stem = _anchor(result.name.removesuffix(".json"))
        for figure in result.figures:
            name = f"{stem}-{_anchor(figure.slug)}.svg"
            pictures[name] = _alone(figure, _anchor(figure.slug))
    return pictures


def _alone(figure: Figure, prefix: str) -> str:
    return f'<?xml version="1.0" encoding="utf-8"?>\n{to_svg(figure, prefix)}\n'
