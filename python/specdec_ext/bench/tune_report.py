"""A search's result: JSON, table, heat maps in a terminal and as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ..extras import require
from .tables import heat_map, wide_console
from .tune import Candidate, Tuning

__all__ = ["best_config", "draw_png", "heat_cells", "print_tuning", "to_dict"]


def best_config(tuning: Tuning) -> dict[str, Any] | None:
    """What --lookahead-config, --prompt-lookup-config and LLM(speculative_config=) take."""
    if tuning.best is None:
        return None
    return tuning.space.config(tuning.best.point).to_dict()


def to_dict(
    tuning: Tuning, step_cost: Mapping[int, float], about: Mapping[str, Any]
) -> dict[str, Any]:
    best, names = tuning.best, tuning.space.names
    return {
        "benchmark": "tune",
        **about,
        "method": tuning.space.method,
        "best": best_config(tuning),
        "best_candidate": None if best is None else best.to_dict(names),
        "measured_speedup": tuning.measured_speedup,
        "candidates": [candidate.to_dict(names) for candidate in tuning.candidates],
        "num_tokens": tuning.num_tokens,
        "identical_to_plain": tuning.identical,
        "step_cost": {str(rows): seconds for rows, seconds in step_cost.items()},
        "stopped": tuning.stopped,
        "seconds": tuning.seconds,
    }


def heat_cells(
    candidates: Sequence[Candidate], down: int, across: int, fixed: tuple[int, ...]
) -> dict[tuple[int, int], float]:
    """Speed-ups by two axes, the others as in `fixed`."""
    return {
        (c.point[down], c.point[across]): c.speedup
        for c in candidates
        if all(
            c.point[axis] == fixed[axis] for axis in range(len(fixed)) if axis not in (down, across)
        )
    }


def _planes(tuning: Tuning) -> list[tuple[int, int, str]]:
    """(axis down, axis across, the rest in words) through the best point."""
    names = tuning.space.names
    centre = _centre(tuning).point
    if len(names) == 2:
        return [(0, 1, "")]
    return [
        (0, 1, f", {names[2]} = {centre[2]}"),
        (0, 2, f", {names[1]} = {centre[1]}"),
    ]


def _centre(tuning: Tuning) -> Candidate:
    return max(tuning.candidates, key=lambda c: (c.speedup, -c.draft_len))


def print_tuning(tuning: Tuning, batch_size: int, stream: IO[str]) -> None:
    """The best candidates, the maps through the best point, the result."""
    from rich.table import Table

    names = tuning.space.names
    console = wide_console(stream)
    shown = sorted(tuning.candidates, key=lambda c: (-c.speedup, c.draft_len))[:15]
    table = Table(title=f"{len(shown)} best of {len(tuning.candidates)} candidates")
    for name in (*names, "drafts", "tokens/step", "rows/step", "accept len", "speed-up"):
        table.add_column(name, justify="right")
    for candidate in shown:
        row = candidate.to_dict(names)
        table.add_row(
            *(str(value) for value in candidate.point),
            str(candidate.draft_len),
            f"{row['tokens_per_step']:.2f}",
            f"{row['rows_per_step']:.1f}",
            f"{row['mean_acceptance_length']:.2f}",
            f"{candidate.speedup:.2f}",
        )
    console.print(table)
    centre = _centre(tuning).point
    for down, across, rest in _planes(tuning):
        cells = heat_cells(tuning.candidates, down, across, centre)
        if len(cells) > 1:
            heat_map(
                f"predicted speed-up{rest}", names[down], sorted({cell[0] for cell in cells}),
                names[across], sorted({cell[1] for cell in cells}), cells, stream,
                best=(centre[down], centre[across]),
            )  # fmt: skip
    lines = []
    if tuning.best is None:
        lines.append("no configuration pays on these prompts: plain decoding is faster")
    else:
        point = ",".join(map(str, tuning.best.point))
        flag = "lookahead" if tuning.space.method == "lookahead" else "prompt_lookup"
        lines.append(
            f"best: --{flag}_config [{point}], predicted {tuning.best.speedup:.2f}x of plain "
            f"decoding at batch size {batch_size}"
            + (
                f", measured {tuning.measured_speedup:.2f}x with all prompts together"
                if tuning.measured_speedup is not None
                else ""
            )
        )
    lines.append(
        f"{tuning.num_tokens} tokens per candidate, {tuning.seconds:.0f} s, search "
        + ("complete" if tuning.stopped == "complete" else "stopped by --max-seconds")
    )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def draw_png(tuning: Tuning) -> bytes:
    """The heat maps side by side, as a PNG file."""
    require("matplotlib", "--png")
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # type: ignore[import-not-found,unused-ignore]

    planes, names = _planes(tuning), tuning.space.names
    centre = _centre(tuning).point
    figure, all_axes = plt.subplots(1, len(planes), figsize=(5.5 * len(planes), 4.5), squeeze=False)
    for axes, (down, across, rest) in zip(all_axes[0], planes, strict=True):
        cells = heat_cells(tuning.candidates, down, across, centre)
        rows, columns = sorted({c[0] for c in cells}), sorted({c[1] for c in cells})
        grid = [[cells.get((r, c), float("nan")) for c in columns] for r in rows]
        image = axes.imshow(grid, cmap="RdYlGn", aspect="auto")
        axes.set(
            xticks=range(len(columns)), xticklabels=columns, xlabel=names[across],
            yticks=range(len(rows)), yticklabels=rows, ylabel=names[down],
            title=f"predicted speed-up{rest}",
        )  # fmt: skip
        for (row, column), value in cells.items():
            star = "*" if (row, column) == (centre[down], centre[across]) else ""
            axes.text(
                columns.index(column), rows.index(row), f"{star}{value:.2f}", ha="center",
                va="center", fontsize=8,
            )  # fmt: skip
        figure.colorbar(image, ax=axes)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    plt.close(figure)
    return picture.getvalue()
