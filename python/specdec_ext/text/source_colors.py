"""Accepted drafts in a terminal's colours, by the source that proposed them."""

from __future__ import annotations

__all__ = ["colored"]

_RESET = "\x1b[0m"
# Sources that are not listed are networks and lookahead.
_COLORS = {
    "request": "\x1b[35m", "prediction": "\x1b[35m", "grammar": "\x1b[33m",
    "suffix": "\x1b[36m", "ngram": "\x1b[36m", "edits": "\x1b[34m",
}  # fmt: skip
_OTHERS = "\x1b[32m"


def colored(text: str, source: str | None) -> str:
    """`text` in the colour of its source; None: it was not drafted and stays as it is."""
    return text if source is None else f"{_COLORS.get(source, _OTHERS)}{text}{_RESET}"
