"""How far a trainer is: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

__all__ = ["TrainProgress", "progress_table"]

_WINDOW = 20  # steps that the shown loss is the mean of


class TrainProgress:
    """Shows a run on stderr; see training.run.Progress."""

    def __init__(self, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True)
        self._quiet, self._clock = quiet, clock
        self._live: Live | None = None
        self._lines: dict[str, int] = {}
        self._began: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> TrainProgress:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_estimate(self, estimate: Any, machine: Any) -> None:
        if not self._quiet:
            for line in estimate.lines(machine):
                self._say(f"estimate: {line}")

    def on_collect(self, collector: Any) -> None:
        rows = {"tokens": f"{collector.num_tokens:,}"}
        # Those of the first call came before its clock began.
        seconds, tokens = self._passed("tokens", collector.num_tokens)
        if tokens and seconds > 0:
            rows["tokens/s"] = f"{tokens / seconds:,.0f}"
        self._show("collecting", collector.num_done, collector.num_texts, rows)

    def on_train(self, training: Any) -> None:
        result, settings = training.result, training.settings
        recent = result.losses[-_WINDOW:]
        rows = {
            "loss": f"{sum(recent) / len(recent):.3f}",
            "learning rate": f"{settings.rate(training.step - 1):.2e}",
        }
        if result.evaluations:
            step, measures = result.evaluations[-1]
            rows[f"accuracy at step {step}"] = " ".join(f"{x:.3f}" for x in measures["accuracy"])
        self._show("training", training.step, settings.steps, rows)

    def on_measure(self) -> None:
        if not self._quiet:
            self._say("measuring against plain decoding")

    def _say(self, line: str) -> None:
        """A line of its own, above the table."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _passed(self, name: str, done: int) -> tuple[float, int]:
        """Seconds and units since the first call with this name."""
        if name not in self._began:
            self._began[name] = (self._clock(), done)
        began, first = self._began[name]
        return self._clock() - began, done - first

    def _show(self, name: str, done: int, total: int, rows: dict[str, str]) -> None:
        if self._quiet:
            return
        if self._live is not None:
            seconds, units = self._passed(name, done)
            left = seconds / units * (total - done) if units else None
            self._live.update(progress_table(name, done, total, rows, left))
            return
        part = 20 * done // max(1, total)
        if self._lines.get(name) != part:
            self._lines[name] = part
            note = " ".join(f"{key} {value}" for key, value in rows.items())
            self._say(f"{name} {done}/{total} {note}")


def progress_table(
    name: str, done: int, total: int, rows: dict[str, str], left: float | None
) -> Table:
    """The live table of one phase; left: seconds, None: not known."""
    table = Table(title=name, min_width=48)
    table.add_column("", justify="right", style="bold")
    table.add_column(f"{done} of {total}")
    width = 30 * done // max(1, total)
    table.add_row(f"{100 * done // max(1, total)} %", "█" * width + "░" * (30 - width))
    for key, value in rows.items():
        table.add_row(key, value)
    if left is not None:
        minutes, seconds = divmod(round(left), 60)
        table.add_row("left", f"{minutes}:{seconds:02d}")
    return table
