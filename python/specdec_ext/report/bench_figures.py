"""Figures of what `specdec bench`, `tune` and `summarize` write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .figures import Bars, Curves, Figure, HeatMap, Shares, survival

__all__ = ["pair", "serve", "summarize", "sweep", "tune"]

Data = Mapping[str, Any]


def _sides(data: Data) -> dict[str, Data]:
    """With speculation and plain, as far as both were measured."""
    sides = {str(data["method"] if data["plain"] else "plain"): data}
    return {**sides, **({"plain": data["plain"]} if data["plain"] else {})}


def pair(data: Data) -> list[Figure]:
    """bench latency and throughput."""
    sides = _sides(data)
    names = list(sides)
    speed = data.get("speedup")
    figures: list[Figure] = [
        Bars(
            "tokens-per-pass", "Tokens per forward pass", "", "tokens",
            categories=names,
            series={"tokens per pass": [s["tokens_per_forward_pass"] for s in sides.values()],
                    "rows per pass": [s["rows_per_forward_pass"] for s in sides.values()]},
        ),
        Bars(
            "speed", "Output tokens per second", "", "tokens/s",
            "" if speed is None else f"{speed:.2f} times plain decoding, median of the rounds",
            categories=names,
            series={"tokens/s": [s["output_tokens_per_second"] for s in sides.values()]},
        ),
        Bars(
            "time", "Where the time goes", "", "s per call", "medians of the rounds",
            categories=names,
            series={part: [s["time_s"][part] for s in sides.values()]
                    for part in ("forward", "draft", "host")},
        ),
    ]  # fmt: skip
    figures += _acceptance(data["speculative_decoding"]["acceptance_histogram"], names[0])
    figures += _latencies(sides)
    return figures


def _acceptance(histogram: Sequence[int], name: str) -> list[Figure]:
    shares = survival(histogram)
    if not shares:
        return []
    note = f"of {sum(histogram)} speculative steps, how many accepted so many drafts or more"
    return [
        Bars(
            "acceptance-by-depth", "Accepted drafts by depth", "depth", "share of steps", note,
            categories=[str(depth) for depth in range(1, len(shares) + 1)], series={name: shares},
        )
    ]  # fmt: skip


def _latencies(sides: Mapping[str, Data], at_once: int | None = None) -> list[Figure]:
    """Distributions; at_once: of so many requests at a time."""
    more = ("", "") if at_once is None else (f"-{at_once}", f", {at_once} at a time")
    figures: list[Figure] = []
    for key, slug, title, label in (
        ("latencies", "latency", "Latency of a call", "s"),
        ("ttfts_ms", "first-token", "Time to the first token", "ms"),
        ("tpots_ms", "further-token", "Time per further token", "ms"),
    ):
        series = {name: side[key] for name, side in sides.items() if side.get(key)}
        if series:
            note = "the share of calls that took no longer" if key == "latencies" else (
                "the share of requests that waited no longer")  # fmt: skip
            figures.append(
                Shares(slug + more[0], title + more[1], label, "share", note, series=series)
            )
    return figures


def _label(draft: Any) -> str:
    return ",".join(map(str, draft)) if isinstance(draft, list) else str(draft)


def sweep(data: Data) -> list[Figure]:
    """bench sweep: batch sizes by draft lengths."""
    rows = data["rows"]
    batches = list(dict.fromkeys(str(row["batch_size"]) for row in rows))
    drafts = list(dict.fromkeys(_label(row["draft"]) for row in rows))
    cells = {(str(row["batch_size"]), _label(row["draft"])): row for row in rows}

    def bars(slug: str, title: str, unit: str, key: str, baseline: float | None) -> Bars:
        series = {
            f"batch {batch}": [
                cells[batch, draft][key] if (batch, draft) in cells else None for draft in drafts
            ]
            for batch in batches
        }
        return Bars(slug, title, "draft length", unit, categories=drafts, series=series,
                    baseline=baseline)  # fmt: skip

    figures: list[Figure] = []
    if len(batches) > 1 and len(drafts) > 1:
        speed = {cell: row["speedup"] for cell, row in cells.items()}
        figures.append(
            HeatMap("speed-up", "Speed-up over plain decoding", "draft length", "batch size",
                    rows=batches, columns=drafts, values=speed)
        )  # fmt: skip
    figures.append(bars("speed-up-bars", "Speed-up over plain decoding", "times", "speedup", 1.0))
    title = "Tokens per forward pass"
    figures.append(bars("tokens-per-pass", title, "tokens", "tokens_per_forward_pass", None))
    latencies = {
        f"batch {batch}, {draft}": row["latencies"]
        for (batch, draft), row in cells.items()
        if batch == batches[0]
    }
    figures.append(
        Shares("latency", f"Latency of a call, batch {batches[0]}", "s", "share",
               "the share of calls that took no longer", series=latencies)
    )  # fmt: skip
    return figures


def serve(data: Data) -> list[Figure]:
    """bench serve: every server at every concurrency."""
    rows = data["rows"]
    levels = list(dict.fromkeys(row["concurrency"] for row in rows))
    names = [server["name"] for server in data["servers"]]
    cells = {(row["server"], row["concurrency"]): row for row in rows}

    def bars(slug: str, title: str, unit: str, value: Callable[[Data], float | None]) -> Bars:
        series = {name: [value(cells[name, level]) for level in levels] for name in names}
        return Bars(slug, title, "requests at a time", unit, f"by {data['tool']}",
                    categories=[str(level) for level in levels], series=series)  # fmt: skip

    figures: list[Figure] = [
        bars("speed", "Output tokens per second", "tokens/s",
             lambda row: row["output_tokens_per_second"]),
        bars("first-token", "Time to the first token, median", "ms",
             lambda row: row["ttft_ms"]["p50"]),
        bars("further-token", "Time per further token, median", "ms",
             lambda row: row["tpot_ms"]["p50"]),
    ]  # fmt: skip
    if any(row["speculative_decoding"] for row in rows):
        figures.append(
            bars("acceptance-length", "Tokens per speculative step", "tokens",
                 lambda row: (row["speculative_decoding"] or {}).get("mean_acceptance_length"))
        )  # fmt: skip
    most = levels[-1]
    return figures + _latencies({name: cells[name, most] for name in names}, most)


def tune(data: Data) -> list[Figure]:
    """The search's candidates, and the measured T(rows) that they were weighed by."""
    points = sorted((int(rows), 1e3 * s) for rows, s in data["step_cost"].items())
    figures: list[Figure] = [
        Curves("step-cost", "T(rows): time of a forward pass", "rows", "ms",
               "the fewer rows cost, the longer drafts pay", series={"T": points}, is_log=True)
    ]  # fmt: skip
    candidates = data["candidates"]
    if not candidates:
        return figures
    best = sorted(candidates, key=lambda c: -c["predicted_speedup"])[:12]
    names = [key for key in best[0] if key not in _CANDIDATE_FIGURES]
    categories = [",".join(str(c[name]) for name in names) for c in best]
    label = ", ".join(names)
    figures.append(
        Bars("speed-up", "The best candidates: predicted speed-up", label, "times",
             categories=categories, series={"predicted": [c["predicted_speedup"] for c in best]},
             baseline=1.0)
    )  # fmt: skip
    figures.append(
        Bars("tokens-per-pass", "The best candidates: tokens and rows per step", label, "",
             categories=categories,
             series={"tokens": [c["tokens_per_step"] for c in best],
                     "rows": [c["rows_per_step"] for c in best]})
    )  # fmt: skip
    if len(names) > 1:
        figures.append(_plane(candidates, best[0], names))
    return figures


# What a candidate's record holds besides its point in the search space.
_CANDIDATE_FIGURES = {
    "max_draft_len", "tokens_per_step", "rows_per_step", "mean_acceptance_length",
    "num_draft_tokens", "num_accepted_draft_tokens", "predicted_speedup", "search",
}  # fmt: skip


def _plane(candidates: Sequence[Data], best: Data, names: Sequence[str]) -> HeatMap:
    """Speed-ups by the first two axes of the search, the others as in the best candidate."""
    down, across, *others = names
    shown = [c for c in candidates if all(c[name] == best[name] for name in others)]
    fixed = ", ".join(f"{name} = {best[name]}" for name in others)
    return HeatMap(
        "plane", "Predicted speed-up" + (f", {fixed}" if fixed else ""), across, down,
        rows=[str(v) for v in sorted({c[down] for c in shown})],
        columns=[str(v) for v in sorted({c[across] for c in shown})],
        values={(str(c[down]), str(c[across])): c["predicted_speedup"] for c in shown},
    )  # fmt: skip


def summarize(data: Data) -> list[Figure]:
    """ROUGE and speed of every side."""
    sides = data["sides"]
    scores = list(next(iter(sides.values()))["rouge"])
    figures: list[Figure] = [
        Bars("rouge", "ROUGE of the summaries", "", "F, of 100",
             f"{len(data['articles'])} articles", categories=scores,
             series={name: [side["rouge"][s] for s in scores] for name, side in sides.items()}),
        Bars("speed", "Output tokens per second", "", "tokens/s", categories=list(sides),
             series={"tokens/s": [side["tokens_per_second"] for side in sides.values()]}),
    ]  # fmt: skip
    lengths = {n: s["acceptance_length"] for n, s in sides.items() if s.get("acceptance_length")}
    if lengths:
        same = data.get("identical")
        note = "" if same is None else (
            f"{same} of {len(data['articles'])} speculative outputs equal to plain")  # fmt: skip
        figures.append(
            Bars("tokens-per-pass", "Tokens per forward pass", "", "tokens", note,
                 categories=list(lengths), series={"tokens per pass": list(lengths.values())})
        )  # fmt: skip
    return figures
