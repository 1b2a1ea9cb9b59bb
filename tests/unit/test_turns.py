"""Benchmarks whose programs take turns: the order of steps, and what is held against what."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from benchmarks import report
from benchmarks.never_slower import round_of, words_of
from benchmarks.turns import Steps, Timed, take_turns


def steps(name: str, count: int, log: list[str]) -> Steps:
    for _ in range(count):
        log.append(name)
        yield
    return Timed(passes=count)


def test_programs_take_turns_step_by_step() -> None:
    log: list[str] = []
    found = take_turns({"a": steps("a", 1, log), "b": steps("b", 3, log), "c": steps("c", 2, log)})
    assert log == ["a", "b", "c", "b", "c", "b"]
    assert {name: timed.passes for name, timed in found.items()} == {"a": 1, "b": 3, "c": 2}


class Fake:
    """A program whose steps take a time of its own."""

    def __init__(self, seconds: float, text: int = 5) -> None:
        self.seconds, self.text = seconds, text

    def run(self, prompts: Any, params: Any) -> Steps:
        yield
        times = dict.fromkeys(("decode", "total", "request"), self.seconds)
        return Timed(dict(times), dict(times), [[self.text, 6, 7]], passes=2, decoded=2, rows=4)


SECONDS = {"plain": 6.0, "suffix": 4.0, "medusa": 3.0, "suffix+medusa": 2.0}


def test_a_composite_is_held_against_its_faster_member() -> None:
    programs: Any = {name: Fake(seconds) for name, seconds in SECONDS.items()}
    args = argparse.Namespace(tokens=3)
    found = round_of(programs, [[[1, 2]], [[3, 4]]], 0.0, args, 0)
    assert found["suffix+medusa"]["wall decode"] == 3.0
    assert found["suffix+medusa"]["wall decode of best"] == 1.5
    assert not any("of best" in what for what in found["suffix"])
    cells = {
        words_of(("q4", 1, name, 0.0)): {
            program: {k: {"median": v} for k, v in figures.items() if " " in k}
            for program, figures in found.items()
        }
        for name in report.SETS
    }
    table = report.sources({"results": cells}).splitlines()
    assert table[-2:] == [
        "| q4 | suffix+medusa | 3.00 | 3.00 | 3.00 | 3.00 | 3.00 |",
        "| q4 | suffix+medusa / its best member | 1.50 | 1.50 | 1.50 | 1.50 | 1.50 |",
    ]


def test_texts_have_to_be_the_same() -> None:
    programs: Any = {"plain": Fake(2.0), "suffix": Fake(1.0, text=6)}
    with pytest.raises(SystemExit, match="not plain decoding's"):
        round_of(programs, [[[1, 2]]], 0.0, argparse.Namespace(tokens=3), 0)
