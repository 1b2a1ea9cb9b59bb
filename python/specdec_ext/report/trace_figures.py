"""Figures of one traced request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .figures import Bars, Curves, Figure, Shares

__all__ = ["depths", "trace"]

Data = Mapping[str, Any]


def depths(drafts: list[Data]) -> list[int]:
    """The depth of each draft of a step: 1 for those after the text's last token, and so on."""
    found: list[int] = []
    for draft in drafts:
        found.append(1 if draft["parent"] < 0 else found[draft["parent"]] + 1)
    return found


def trace(data: Data) -> list[Figure]:
    """Rows and tokens of every pass, acceptance by depth and by source, times of passes."""
    steps = data["steps"]
    figures: list[Figure] = [
        Curves("steps", "What every forward pass brought", "pass", "",
               "the first passes read the prompt: their rows are not shown",
               series={
                   "rows": [(i, s["num_rows"]) for i, s in enumerate(steps, 1)
                            if not s["is_prefill"]],
                   "tokens": [(i, len(s["tokens"])) for i, s in enumerate(steps, 1)],
               }),
    ]  # fmt: skip
    by_depth: dict[int, list[int]] = {}
    by_source: dict[str, list[int]] = {}
    for step in steps:
        for draft, depth in zip(step["drafts"], depths(step["drafts"]), strict=True):
            by_depth.setdefault(depth, []).append(draft["accepted"])
            for source in draft["sources"]:
                by_source.setdefault(source, []).append(draft["accepted"])
    for slug, title, label, found in (
        ("acceptance-by-depth", "Accepted drafts by depth", "depth",
         {str(depth): kept for depth, kept in sorted(by_depth.items())}),
        ("acceptance-by-source", "Accepted drafts by source", "source", by_source),
    ):  # fmt: skip
        if found:
            figures.append(
                Bars(slug, title, label, "drafts", categories=list(found),
                     series={"verified": [len(kept) for kept in found.values()],
                             "accepted": [sum(kept) for kept in found.values()]})
            )  # fmt: skip
    decoding = [step for step in steps if not step["is_prefill"]]
    times = {
        words: [s["end_ms"] - s["begin_ms"] for s in decoding if bool(s["drafts"]) is drafted]
        for words, drafted in (("with drafts", True), ("without drafts", False))
    }
    known = {words: values for words, values in times.items() if values}
    if known:
        figures.append(
            Shares("latency", "Time of a decode step", "ms", "share",
                   "the share of steps that took no longer", series=known)
        )  # fmt: skip
    return figures
