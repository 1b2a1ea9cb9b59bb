"""The README's tables: those that say whether it is faster, and than what. Each has a column, or
one for each width, for every processor that it was measured on; docs/results.md has the rest."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

Result = tuple[Path, dict[str, Any]]
WIDTHS = ("BF16", "Q8_0", "Q4_0")  # that every program has, of those that were measured
# What the README says of other programs; docs/results.md has every ratio.
PEER_RATIOS = {
    "plain / llama_cpp plain, decode": "plain / llama.cpp plain, decode",
    "plain / openvino plain, decode": "plain / OpenVINO plain, decode",
    "default / best peer, end to end": "default / best peer, end to end",
    "default / best peer, humaneval": "the same, code (humaneval)",
    "default / best peer, squad": "the same, questions about a passage (squad)",
    "default / best peer, squad, equal lengths": "the same, for answers of equal lengths",
    "default / best peer, news": "the same, summaries (news)",
    "batch of 8 / best peer": "batch of 8 / best peer",
    "prefill / best peer": "prompts / best peer",
    "fast prefill / best peer": 'prompts with `numerics="fast"` / best peer',
}


def brand(result: Mapping[str, Any]) -> str:
    """The processor without its generation, and the widest instruction set that was used."""
    env = result["environment"]
    name = env["cpu"].partition(",")[0].replace("(R)", "").removesuffix(" Processor")
    return f"{name} ({env.get('build', {}).get('cpu_isa', 'unknown')})"


def newest(found: Iterable[Result]) -> dict[str, Result]:
    """By brand; `found` has the newest first."""
    columns: dict[str, Result] = {}
    for path, result in found:
        columns.setdefault(brand(result), (path, result))
    return dict(sorted(columns.items()))


def sources(columns: Iterable[Result], folder: str) -> str:
    """Dates and files, as the page's links name them."""
    links = (
        f"{result['environment']['date'][:10]} [{path.stem}]({folder}/{path.name})"
        for path, result in columns
    )
    return ", ".join(links)


def peers_cpu(columns: Mapping[str, Result]) -> str:
    """The median of each ratio, a column for each processor and width."""
    header, cells = ["ours / theirs, median"], []
    for name, (_, result) in columns.items():
        for width in (w for w in WIDTHS if w in result["results"]):
            found = result["results"][width]
            header.append(f"{name}, {width}")
            cells.append({key: r["median"] for key, r in found["ratios"].items()})
    rows = [
        [label, *(cell.get(key, "") for cell in cells)]
        for key, label in PEER_RATIOS.items()
        if any(key in cell for cell in cells)
    ]
    return common.markdown(header, rows)


def mean_and_range(ratios: Sequence[float]) -> str:
    """Geometric mean (least to most); '' of none."""
    if not ratios:
        return ""
    mean = statistics.geometric_mean(ratios)
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def never_slower(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each width, batch and temperature: the mean over sets of prompts of all steps'
    time, prompts included, a column for each of `results`, which are those of a processor."""
    lines: dict[tuple[int, str, str], dict[str, list[float]]] = {}
    for column, cells in results.items():
        for name, programs in cells.items():
            width, batch, _, temperature = name.split(", ")
            line = (int(batch.removeprefix("B = ")), temperature, width)
            ratio = programs["auto"]["wall total"]["median"]
            lines.setdefault(line, {}).setdefault(column, []).append(ratio)
    rows = [
        [f"B = {batch}, {temperature}, {width}",
         *(mean_and_range(line.get(column, [])) for column in results)]
        for (batch, temperature, width), line in sorted(lines.items())
    ]  # fmt: skip
    return common.markdown(["mean of five sets (least to most)", *results], rows)
