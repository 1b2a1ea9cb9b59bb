"""The script that takes a newcomer's first minutes: what it runs, and what it finds wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from benchmarks import first_minutes
from benchmarks.first_minutes import LIMIT_S, Minutes, readme_commands, tokens_per_second

GOOD = Minutes(("Paris.", "class Stack:"), True, True, {"chat": 1.0, "generate": 2.0}, 30.0, 20.0)


def test_the_readme_has_the_two_commands() -> None:
    chat, generate = readme_commands(first_minutes.README.read_text())
    assert chat[:2] == ["specdec", "chat"] and not chat[2].startswith("-")
    assert generate[:2] == ["specdec", "generate"] and "--chat" in generate
    assert "--color_accepted" in generate
    assert not [word for word in generate if "_config" in word]  # what everyone gets by default


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answers": ("", "x")}, "specdec chat answered with nothing"),
        ({"answers": ("x", " \n")}, "specdec generate answered with nothing"),
        ({"colored": False}, "no token is coloured"),
        ({"equal": False}, "differ from those of plain"),
        ({"default": 19.9}, "19.9 tokens/s are not more than 20.0 of plain"),
        ({"seconds": {"chat": LIMIT_S, "generate": 1.0}}, "181 s are more than 180"),
    ],
)
def test_what_is_not_as_it_should_be(change: dict[str, object], words: str) -> None:
    assert GOOD.faults() == []
    [fault] = dataclasses.replace(GOOD, **change).faults()  # type: ignore[arg-type]
    assert words in fault


def test_speed_is_that_behind_the_first_token() -> None:
    metrics = {"num_generated_tokens": 11, "tokens_per_second": 5.5, "time_to_first_token_ms": 1000}
    assert tokens_per_second(metrics) == pytest.approx(10.0)


@pytest.mark.default_model
def test_the_first_minutes(
    default_model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of it once; how long it took is for a quiet machine to say."""
    target = tmp_path / "seen.json"
    first_minutes.main(["--rounds", "1", f"--output={target}"])
    said = capsys.readouterr()
    seen = json.loads(target.read_text())
    assert all(answer.strip() for answer in seen["answers"]) and seen["equal"]
    assert "class Stack" in said.out and "default / plain: " in said.out
    assert set(seen["seconds"]) == {"chat", "generate", "default 1", "plain 1"}
    assert all(fault in said.err for fault in seen["faults"])
