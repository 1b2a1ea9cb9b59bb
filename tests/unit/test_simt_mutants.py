"""The mutants of tests/simt fit the sources: a renamed line or file is found without a build."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "simt"))

import mutants  # noqa: E402
from mutants.model import Mutant  # noqa: E402


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_occurs_once(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    words = r"\s+".join(re.escape(word) for word in mutant.old.split())
    assert len(re.findall(words, source)) == 1
    assert mutant.old.split() != mutant.new.split()


def test_names_are_unique_and_suites_exist() -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)
    assert {mutant.suite for mutant in mutants.MUTANTS} == set(mutants.SUITES)
    for name, suite in mutants.SUITES.items():
        sources = [path.relative_to(ROOT / "cuda").as_posix() for path in ROOT.glob("cuda/**/*.cu")]
        for pattern in suite.objects:
            assert any(re.search(pattern, source) for source in sources), f"{name}: {pattern}"
        for file in suite.files:
            assert (ROOT / "tests" / "kernels" / file).exists(), f"{name}: {file}"
