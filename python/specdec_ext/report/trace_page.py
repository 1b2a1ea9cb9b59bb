"""A trace as a page: the text with its drafts marked, and each step's whole draft tree."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from .page import render_page
from .trace_text import summary, visible

__all__ = ["trace_page"]

Data = Mapping[str, Any]

_STYLE = """
.text { white-space: pre-wrap; border: 1px solid #ddd; padding: .7rem; }
.draft { background: #d5efdf; border-bottom: 2px solid #009e73; }
.trees ul { list-style: none; margin: 0; padding-left: 1.1rem; border-left: 1px solid #ddd; }
.trees > td > ul { border: 0; padding: 0; }
#steps th:nth-child(n+5) { text-align: left; }
.trees td { vertical-align: top; text-align: left; } .trees .number { text-align: right; }
.trees code { white-space: pre; } .no code { color: #a33; text-decoration: line-through; }
.yes > code { background: #d5efdf; font-weight: 600; } .sources { color: #777; font-size: .75rem; }
"""


def trace_page(data: Data, title: str) -> str:
    """The page; it holds everything it shows."""
    rows = "".join(_row(number, step) for number, step in enumerate(data["steps"], 1))
    body = (
        f"<p>{escape(summary(data))}</p>"
        '<p class="note">Marked: drafts that the model confirmed. A step checks a whole tree of '
        "them in one pass of the model.</p>"
        f'<p class="text" id="text">{_marked(data)}</p>'
        '<table id="steps"><thead><tr><th>pass</th><th>ms</th><th>rows</th><th>accepted</th>'
        "<th>drafts</th><th>text</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )
    return render_page(title, [], body=body, more_style=_STYLE)


def _marked(data: Data) -> str:
    return "".join(_tokens(step, "") for step in data["steps"])


def _tokens(step: Data, one_line: str) -> str:
    found = []
    for token in step["tokens"]:
        text = escape(visible(token["text"]) if one_line else token["text"])
        found.append(f'<span class="draft">{text}</span>' if token["from_draft"] else text)
    return "".join(found)


def _row(number: int, step: Data) -> str:
    drafts = step["drafts"]
    accepted = sum(draft["accepted"] for draft in drafts)
    numbers = (
        str(number),
        f"{step['end_ms'] - step['begin_ms']:.1f}",
        str(step["num_rows"]),
        f"{accepted} of {len(drafts)}" if drafts else "",
    )
    cells = "".join(f'<td class="number">{cell}</td>' for cell in numbers)
    tree = "reads the prompt" if step["is_prefill"] and not drafts else _tree(drafts, -1)
    return (
        f'<tr class="trees">{cells}<td>{tree}</td><td><code>{_tokens(step, "yes")}</code></td></tr>'
    )


def _tree(drafts: list[Data], parent: int) -> str:
    """The drafts after `parent`, as nested lists."""
    items = "".join(
        f'<li class="{"yes" if draft["accepted"] else "no"}"><code>{escape(visible(draft["text"]))}'
        f'</code> <span class="sources">{escape(" ".join(draft["sources"]))}</span>'
        f"{_tree(drafts, i)}</li>"
        for i, draft in enumerate(drafts)
        if draft["parent"] == parent
    )
    return f"<ul>{items}</ul>" if items else ""
