"""Figures of what the programs in benchmarks/ write."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .figures import Bars, Curves, Figure, Shares

__all__ = ["acceptance", "end_to_end", "model_drafters", "step_cost"]

Data = Mapping[str, Any]


def acceptance(data: Data) -> list[Figure]:
    """Tokens per pass and accepted drafts, by kind of prompt."""
    results = data["results"]
    sets = list(next(iter(results.values())))

    def bars(slug: str, title: str, unit: str, key: str) -> Bars:
        series = {method: [cells[s][key] for s in sets] for method, cells in results.items()}
        return Bars(slug, title, "prompts", unit, categories=sets, series=series)

    return [
        bars("tokens-per-pass", "Tokens per forward pass", "tokens", "tokens_per_forward"),
        bars("acceptance", "Accepted of all verified drafts", "share", "draft_acceptance_rate"),
        bars("drafts", "Verified drafts per forward pass", "drafts", "drafts_per_forward"),
    ]


def _sets(cells: Data) -> list[str]:
    """The kinds of prompts among a data type's cells, which hold batches, too."""
    return [name for name in cells if not name.startswith("batch ")]


def end_to_end(data: Data) -> list[Figure]:
    """Ratios of wall-clock time and tokens per pass, by kind of prompt, for each data type."""
    figures: list[Figure] = []
    for dtype, cells in data["results"].items():
        sets = _sets(cells)
        names = list(cells[sets[0]]["ratios"])
        over_plain = [name for name in names if name.endswith("/ plain")]
        others = [name for name in names if name not in over_plain]
        for slug, title, chosen in (
            ("speed-up", "Speed-up over plain decoding", over_plain),
            ("against-others", "Speed against other programs", others),
        ):
            series = {
                name: [cells[s]["ratios"][name]["total"]["median"] for s in sets] for name in chosen
            }
            if series:
                figures.append(
                    Bars(f"{slug}-{dtype}", f"{title}, {dtype}", "prompts", "times",
                         "medians of the rounds; prompts included", categories=sets,
                         series=series, baseline=1.0)
                )  # fmt: skip
        figures += _programs(dtype, {s: cells[s]["programs"] for s in sets})
    return figures


def model_drafters(data: Data) -> list[Figure]:
    """Drafters that are models against plain decoding, by kind of prompt."""
    figures: list[Figure] = []
    for dtype, cells in data["results"].items():
        sets = _sets(cells)
        programs = list(cells[sets[0]]["programs"])
        series = {
            f"{_words(program)} / plain": [
                _ratio(cells[s]["programs"][program], cells[s]["programs"]["plain"]) for s in sets
            ]
            for program in programs
            if program != "plain" and not program.startswith("peer")
        }
        figures.append(
            Bars(f"speed-up-{dtype}", f"Speed-up over plain decoding, {dtype}", "prompts", "times",
                 "tokens per second, medians of the rounds", categories=sets, series=series,
                 baseline=1.0)
        )  # fmt: skip
        figures += _programs(dtype, {s: cells[s]["programs"] for s in sets})
    return figures


def _words(program: str) -> str:
    return program.replace("peer_", "transformers, ").replace("_", " ")


def _ratio(ours: Sequence[Data], theirs: Sequence[Data]) -> float:
    rates = [(float(a["tokens_per_second"]), b) for a, b in zip(ours, theirs, strict=True)]
    return statistics.median([rate / float(b["tokens_per_second"]) for rate, b in rates])


def _programs(dtype: str, by_set: Mapping[str, Data]) -> list[Figure]:
    """Tokens per pass of every program, and how its calls' speeds spread."""
    sets = list(by_set)
    names = list(by_set[sets[0]])

    def median(runs: Sequence[Data], key: str) -> float | None:
        known = [run[key] for run in runs if run.get(key) is not None]
        return statistics.median(known) if known else None

    passes = {
        _words(name): [median(by_set[s][name], "tokens_per_forward") for s in sets]
        for name in names
    }
    figures: list[Figure] = []
    if any(value is not None for values in passes.values() for value in values):
        figures.append(
            Bars(f"tokens-per-pass-{dtype}", f"Tokens per forward pass, {dtype}", "prompts",
                 "tokens", "after the prompt", categories=sets, series=passes)
        )  # fmt: skip
    seconds = {
        _words(name): [
            1e3 * run["seconds"] / run["tokens"] for s in sets for run in by_set[s][name]
        ]
        for name in names
    }
    figures.append(
        Shares(f"latency-{dtype}", f"Time per token of a call, {dtype}", "ms", "share",
               "all kinds of prompts; the share of calls that took no longer", series=seconds)
    )  # fmt: skip
    return figures


def step_cost(data: Data) -> list[Figure]:
    """T(rows), and the time that a read of the weights takes."""
    results = data["results"]
    series: dict[str, list[tuple[float, float]]] = {}
    for width, cells in results.items():
        series[width] = sorted((int(rows), ms) for rows, ms in cells["ms"].items())
        series[f"{width}, read"] = [(rows, cells["read_ms"]) for rows, _ in series[width]]
    return [
        Curves("step-cost", "T(rows): time of a forward pass", "rows", "ms",
               f"context {data['context']}; read: what a greedy pass reads of the weights, alone",
               series=series, is_log=True)
    ]  # fmt: skip
