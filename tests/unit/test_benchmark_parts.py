"""Benchmarks in parts: what was measured is kept, and a call ends in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import common, parts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(parts, "FOLDER", tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(common, "commit", lambda: "abc")
    return now


def run(clock: list[float], minutes: float | None, settings: dict[str, Any]) -> list[int]:
    """Seven parts of 40 seconds each: those that this call measured."""
    kept, measured = parts.Parts("x", settings, minutes), []
    for i in range(7):
        if kept.get(str(i)) is not None:
            continue
        if not kept.begin():
            break
        clock[0] += 40.0
        kept.put(str(i), {"figure": i})
        measured.append(i)
    return measured


def test_the_next_call_goes_on(clock: list[float]) -> None:
    assert run(clock, 2.0, {"a": 1}) == [0, 1, 2]
    assert run(clock, 1.9, {"a": 1}) == [3, 4]
    assert run(clock, 2.0, {"a": 2}) == [0, 1, 2]  # of other settings
    assert run(clock, None, {"a": 1}) == [5, 6]
    kept = parts.Parts("x", {"a": 1})
    assert [kept.get(str(i)) for i in range(8)] == [*({"figure": i} for i in range(7)), None]
    assert len(kept.loads) == 7


def test_another_commit_begins_anew(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    run(clock, None, {})
    monkeypatch.setattr(common, "commit", lambda: "def")
    assert run(clock, None, {}) == list(range(7))
