"""A trace in a terminal, a pipe, or as a picture of a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["print_trace", "summary", "trace_svg", "visible"]

Data = Mapping[str, Any]

_ACCEPTED, _REJECTED, _OWN = "bold green", "dim red", "default"
_MOST_SHOWN = 12  # rejected drafts of a step, as text
# rich's own pictures name a font on somebody's server.
_FONT_RULE = re.compile(r"@font-face \{[^}]*\}\s*")


def visible(text: str) -> str:
    """A token's text on one line."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def summary(data: Data) -> str:
    """Tokens, passes and drafts in one line."""
    metrics, steps = data["metrics"], data["steps"]
    spec = metrics["speculative_decoding"]
    line = (
        f"{metrics['num_generated_tokens']} tokens in {metrics['num_forward_passes']} passes "
        f"({metrics['tokens_per_forward_pass']:.2f} a pass)"
    )
    if steps:
        line += f", {steps[-1]['end_ms'] - steps[0]['begin_ms']:.0f} ms"
    return (
        f"{line}; {spec['num_accepted_draft_tokens']} of {spec['num_draft_tokens']} drafts "
        f"accepted; finish reason: {data['finish_reason']}"
    )


def _drafted(step: Data) -> Text:
    """Accepted drafts, then those that were not."""
    from rich.text import Text

    text = Text()
    for draft in step["drafts"]:
        if draft["accepted"]:
            text.append(visible(draft["text"]), _ACCEPTED)
    rejected = [visible(draft["text"]) for draft in step["drafts"] if not draft["accepted"]]
    if rejected:
        text.append(" | " if text else "| ", "dim")
        for word in rejected[:_MOST_SHOWN]:
            text.append(word, _REJECTED)
        if len(rejected) > _MOST_SHOWN:
            text.append(f" +{len(rejected) - _MOST_SHOWN}", "dim")
    return text


def _tokens(step: Data, *, one_line: bool) -> Text:
    from rich.text import Text

    text = Text()
    for token in step["tokens"]:
        words = visible(token["text"]) if one_line else token["text"]
        text.append(words, _ACCEPTED if token["from_draft"] else _OWN)
    return text


def _print(data: Data, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold", show_edge=False)
    for name in ("pass", "ms", "rows", "drafts"):
        table.add_column(name, justify="right")
    table.add_column("source")
    for name in ("drafted: accepted | not", "text"):
        table.add_column(name, overflow="fold", ratio=1)
    for number, step in enumerate(data["steps"], 1):
        count = len(step["drafts"])
        accepted = sum(draft["accepted"] for draft in step["drafts"])
        sources = list(dict.fromkeys(s for draft in step["drafts"] for s in draft["sources"]))
        source = "prompt" if step["is_prefill"] else " ".join(sources) or "-"
        table.add_row(
            str(number), f"{step['end_ms'] - step['begin_ms']:.1f}", str(step["num_rows"]),
            f"{accepted}/{count}" if count else "-", source, _drafted(step),
            _tokens(step, one_line=True),
        )  # fmt: skip
    console.print(table)
    console.print()
    for step in data["steps"]:
        console.print(_tokens(step, one_line=False), end="", soft_wrap=True)
    console.print()
    console.print(summary(data), style="dim", soft_wrap=True, markup=False)


def print_trace(data: Data, stream: IO[str], *, color: bool) -> None:
    """A line per pass, the text with accepted drafts in green, the sums."""
    from rich.console import Console

    width = None if stream.isatty() else 120
    _print(data, Console(file=stream, width=width, no_color=not color, highlight=False,
                         force_terminal=color, legacy_windows=False))  # fmt: skip


def trace_svg(data: Data, title: str, *, width: int = 110) -> str:
    """The same as a picture; it needs no font from elsewhere."""
    from rich.console import Console

    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True,
                      highlight=False, legacy_windows=False, color_system="truecolor")  # fmt: skip
    _print(data, console)
    svg = console.export_svg(title=title, unique_id="trace")
    return _FONT_RULE.sub("", svg)
