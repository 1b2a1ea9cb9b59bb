"""benchmarks.step_versions: both sides are asked the same, and the table says what came back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import step_versions
from benchmarks.peers.base import environment

METHODS = ("plain", "prompt lookup", "lookahead", "Medusa", "ReDrafter", "draft-target")


def test_every_case_on_both_sides() -> None:
    """This checkout against itself: counts and texts agree; times are not looked at."""
    python = Path(sys.executable)
    result = step_versions.run_round({"this": python, "base": python}, step_versions.QUICK, 0)
    rows = step_versions.summary([result])
    assert [(row["method"], row["batch"]) for row in rows] == [
        (m, b) for m in METHODS for b in (1, 8)
    ]
    tokens, _ = step_versions.QUICK["tiny"]
    for row in rows:
        assert row["tokens"] == row["batch"] * tokens
        assert 0 < row["steps"]["this"] == row["steps"]["base"] <= tokens
    assert step_versions.table_of(rows).count("\n") == len(rows) + 1


def figures(microseconds: float, digest: str = "same") -> dict[str, Any]:
    about = {"steps": 9, "tokens": 12, "digest": digest, "forward_clock": "processor"}
    return {**dict.fromkeys(step_versions.FIGURES, microseconds), **about}


def test_ratios_are_taken_within_a_round() -> None:
    """A round in which everything is slow counts as much as the others: medians of ratios."""
    key = ("tiny", "plain", 1)
    rounds = [
        {key: {"this": figures(a), "base": figures(b)}}
        for a, b in ((110.0, 100.0), (900.0, 1000.0), (101.0, 100.0))
    ]
    (row,) = step_versions.summary(rounds)
    assert row["step_cpu_us"]["ratio"] == {
        "median": pytest.approx(1.01), "min": pytest.approx(0.9), "max": pytest.approx(1.1)
    }  # fmt: skip
    assert row["step_cpu_us"]["this"] == 110.0
    assert step_versions.table_of([row]).splitlines()[-1].endswith("| yes |")
    (row,) = step_versions.summary(rounds[:1])
    assert step_versions.table_of([row]).splitlines()[-1].endswith("| no |")


def test_unequal_texts_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, python: Path) -> None:
            self.name = str(python)
            self.about = {"package": self.name}

        def ask(self, case: Any) -> dict[str, Any]:
            return figures(1.0, self.name)

        def close(self) -> None:
            pass

    monkeypatch.setattr(step_versions, "Side", Fake)
    with pytest.raises(SystemExit, match="texts differ"):
        step_versions.run_round({"this": Path("a"), "base": Path("b")}, step_versions.QUICK, 0)
    monkeypatch.setattr(
        Fake, "__init__", lambda self, python: setattr(self, "about", {"package": "x"})
    )
    with pytest.raises(SystemExit, match="both sides import the package of x"):
        step_versions.run_round({"this": Path("a"), "base": Path("b")}, step_versions.QUICK, 0)


def test_an_environment_counts_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted build, or one of another Python, is made again."""
    monkeypatch.setattr(environment, "WHOLE", tmp_path / "complete")
    made: list[int] = []
    monkeypatch.setattr(environment, "make", lambda: made.append(1))
    assert not environment.is_ready()
    environment.ready()
    (tmp_path / "complete").write_text("another Python")
    environment.ready()
    (tmp_path / "complete").write_text(sys.version)
    environment.ready()
    assert len(made) == 2
