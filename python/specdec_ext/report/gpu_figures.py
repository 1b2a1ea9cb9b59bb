"""Figures of the GPU runner's result file: what its cells measured, nothing for those that did
not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .figures import Bars, Curves, Figure

__all__ = ["gpu"]

Data = Mapping[str, Any]
_OURS = ("exact", "fast")


def gpu(data: Data) -> list[Figure]:
    """Steps with the model, speculation, attention; of an emulated run nothing, it has no times."""
    stages = data["stages"]
    cells = {
        name: cell
        for stage in ("bench-kernel", "bench-step")
        for name, cell in stages.get(stage, {}).get("cells", {}).items()
        if cell.get("status") == "ok"
    }
    return [*_passes(cells), *_speculation(cells), *_attention(cells)]


def _passes(cells: Mapping[str, Data]) -> list[Figure]:
    """T(rows) of the passes that were captured as graphs."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name, cell in cells.items():
        if not name.startswith("model-b") or not cell.get("us"):
            continue
        words = f"{cell['requests']} requests, {cell['numerics']}"
        series.setdefault(words, []).append((cell["rows"], cell["us"] / 1e3))
        if cell.get("floor_us") and cell["numerics"] == "fast":
            floor = series.setdefault(f"{cell['requests']} requests, floor", [])
            floor.append((cell["rows"], cell["floor_us"] / 1e3))
    if not series:
        return []
    return [
        Curves("step-cost", "T(rows): time of a forward pass", "rows of a request", "ms",
               "captured as a graph; floor: the device's measured read bandwidth and arithmetic",
               series={words: sorted(points) for words, points in series.items()}, is_log=True)
    ]  # fmt: skip


def _speculation(cells: Mapping[str, Data]) -> list[Figure]:
    found = {n: c for n, c in cells.items() if c.get("kind") == "spec" and c.get("tokens_per_s")}
    if not found:
        return []
    names = [name.removeprefix("spec-") for name in found]
    note = "drafts are kept at given rates (synthetic acceptance): steps are measured, not drafts"
    figures: list[Figure] = [
        Bars("speculation-speed", "Output tokens per second, whole engine", "", "tokens/s", note,
             categories=names, series={"tokens/s": [c["tokens_per_s"] for c in found.values()]}),
        Bars("tokens-per-pass", "Tokens per forward pass and request", "", "tokens", note,
             categories=names,
             series={"tokens": [c["accepted_tokens_per_step"] for c in found.values()]}),
    ]  # fmt: skip
    timed = {n: c["step_times"]["decode"] for n, c in found.items() if c.get("step_times")}
    timed = {name: parts for name, parts in timed.items() if parts.get("steps")}
    if timed:
        series = {
            part: [1e3 * parts[part] / parts["steps"] for parts in timed.values()]
            for part in ("draft", "verify", "accept")
        }
        figures.append(
            Bars("time", "Where a step's time goes", "", "ms",
                 categories=[name.removeprefix("spec-") for name in timed], series=series)
        )  # fmt: skip
    return figures


def _attention(cells: Mapping[str, Data]) -> list[Figure]:
    """Our kernel, its floor and the fastest peer, by contexts of the same batch and rows."""
    groups: dict[str, dict[str, Data]] = {}
    for name, cell in cells.items():
        if not name.startswith("attn-") or not cell.get("programs", {}).get("exact", {}).get("us"):
            continue
        head, _, context = name.partition("-ctx")
        groups.setdefault(head, {})[context] = cell
    figures: list[Figure] = []
    for head, by_context in groups.items():
        if len(by_context) < 2:
            continue  # one context is a table's work, not a plot's
        series: dict[str, list[float | None]] = {"floor": [], "exact": [], "fast": [], "peer": []}
        for cell in by_context.values():
            programs = cell["programs"]
            peers = [p["us"] for n, p in programs.items() if n not in _OURS and p.get("us")]
            series["floor"].append(cell["floor_us"])
            series["exact"].append(programs["exact"]["us"])
            series["fast"].append(programs.get("fast", {}).get("us"))
            series["peer"].append(min(peers, default=None))
        known = {n: v for n, v in series.items() if any(value is not None for value in v)}
        figures.append(
            Bars(head, f"Attention, {head.removeprefix('attn-')}", "context", "us",
                 "peer: the fastest of those that were measured beside it",
                 categories=list(by_context), series=known)
        )  # fmt: skip
    return figures
