"""What a trainer shows: lines in a log, a table on a terminal, nothing when asked to be quiet."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from specdec_ext.cli.train_progress import TrainProgress, progress_table
from specdec_ext.training.loop import TrainingResult, TrainSettings


def training(step: int) -> Any:
    result = TrainingResult(losses=[4.0] * (step - 1) + [2.0])
    if step >= 50:
        result.evaluations.append((50, {"accuracy": [0.25, 0.125]}))
    return SimpleNamespace(step=step, result=result, settings=TrainSettings(steps=100))


def collector(done: int) -> Any:
    return SimpleNamespace(num_done=done, num_texts=40, num_tokens=10 * done)


def test_a_log_has_a_line_for_every_twentieth(capsys: pytest.CaptureFixture[str]) -> None:
    clock = itertools.count(0, 2.0)
    with TrainProgress(False, clock=lambda: float(next(clock))) as progress:
        for done in range(1, 41):
            progress.on_collect(collector(done))
        for step in range(1, 101):
            progress.on_train(training(step))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["collecting", "1/40"], ["collecting", "2/40"], ["collecting", "4/40"],
    ]  # fmt: skip
    assert "tokens/s" in lines[2] and lines[20] == "collecting 40/40 tokens 400 tokens/s 5"
    assert len(lines) == 21 + 21
    assert lines[-1].endswith("accuracy at step 50 0.250 0.125") and "loss 3.900" in lines[-1]


def test_tokens_before_the_first_report_have_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """With an empty cache the first report comes with the first batch, its clock begins then."""
    times = iter((5.0, 5.000001, 15.0))
    with TrainProgress(False, clock=lambda: next(times)) as progress:
        for done in (20, 22):
            progress.on_collect(collector(done))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "collecting 20/40 tokens 200"
    assert second == "collecting 22/40 tokens 220 tokens/s 2"


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainProgress(True) as progress:
        progress.on_estimate(None, None)
        progress.on_collect(collector(5))
        progress.on_train(training(7))
        progress.on_measure()
    assert capsys.readouterr().err == ""


def test_the_table_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(progress_table("training", 50, 200, {"loss": "3.900"}, 125.4))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("training", "50 of 200", "25 %", "3.900", "2:05"):
        assert part in text
    assert text.count("█") == 7 and text.count("░") == 23
