"""The mutants of asm text (`make ptx-mutate`) fit the wrappers as they are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "ptx"


@pytest.fixture(scope="module")
def mutate() -> dict[str, Any]:
    """The names of tests/ptx/mutate.py, whose `mutants` is the module beside it."""
    before = sys.modules.pop("mutants", None)
    sys.path.insert(0, str(FOLDER))
    try:
        return runpy.run_path(str(FOLDER / "mutate.py"))
    finally:
        sys.path.remove(str(FOLDER))
        del sys.modules["mutants"]
        if before is not None:
            sys.modules["mutants"] = before


def test_every_mutant_changes_the_asm_that_it_names(mutate: dict[str, Any]) -> None:
    made = []
    for mutant in mutate["MUTANTS"]:
        text = mutate["mutated"](mutant)
        original = (FOLDER.parents[1] / mutant.file).read_text()
        changed = [
            (old, new)
            for old, new in zip(original.splitlines(), text.splitlines(), strict=True)
            if old != new
        ]
        assert changed, mutant.what
        assert all('"' in old for old, _ in changed), f"{mutant.what}: not in a text"
        made.append((mutant.file, text))
    assert len(set(made)) == len(made) >= 30


def test_a_mutant_that_fits_no_more_is_told(mutate: dict[str, Any]) -> None:
    file = mutate["MUTANTS"][0].file
    stale = mutate["Mutant"]("gone", file, "cp_async_16(", "no such text", "")
    with pytest.raises(mutate["Stale"], match="does not fit"):
        mutate["mutated"](stale)
