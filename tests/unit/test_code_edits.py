"""The set of code edits: the same every time, real code, each task possible."""

from __future__ import annotations

import ast
import random
from collections import Counter

import pytest
from benchmarks.code_edit_cases import code_edits, digest, misspell, source_of
from benchmarks.code_edits import ceiling, share_of


def test_twenty_cases_of_real_code() -> None:
    cases = code_edits()
    assert Counter(case.kind for case in cases) == {"rename": 7, "parameter": 7, "typo": 6}
    assert len({case.name for case in cases}) == 20
    assert digest(cases) == digest(code_edits())
    for case in cases:
        [function] = ast.parse(case.source).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name == case.name.rpartition(".")[2]
        assert case.source in case.message and case.task in case.message
        assert (case.source == source_of(case.name)) == (case.kind != "typo")
        if case.kind == "rename":
            assert case.task.split()[-1].rstrip(".") not in case.source


def test_one_word_is_misspelt() -> None:
    wrong, word, misspelt = misspell('def f():\n    """It returns nothing."""\n')
    assert (word, misspelt) == ("returns", "retruns")
    assert wrong == 'def f():\n    """It retruns nothing."""\n'
    with pytest.raises(SystemExit, match="no word to misspell"):
        misspell("def f():\n    return None\n")


@pytest.mark.parametrize(
    ("answer", "prediction", "share"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6], 6 / 7),
        ([1, 2, 9, 4, 5], [1, 2, 4, 5], 0.0),  # runs of two are nothing to go by
        ([4, 5, 6, 1, 2, 3], [1, 2, 3, 4, 5, 6], 0.5),  # in order
        ([], [1], 0.0),
    ],
)
def test_share_of_an_answer(answer: list[int], prediction: list[int], share: float) -> None:
    assert share_of(answer, prediction) == share


@pytest.mark.parametrize(
    ("answer", "prediction", "wanted"),
    [
        ([7, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 5 / 1.5),  # four drafts, and the last token comes too
        ([7, 1, 2, 9, 3, 4, 5], [1, 2, 3, 4, 5], 6 / 2.5),
        ([7, 8, 9], [1, 2, 3], 1.0),
        ([7], [7], 1.0),
    ],
)
def test_ceiling_of_an_answer(answer: list[int], prediction: list[int], wanted: float) -> None:
    """A draft costs an eighth of a step."""
    assert ceiling(answer, prediction, lambda rows: 1 + (rows - 1) / 8) == pytest.approx(wanted)


def test_ceiling_is_the_best_of_all_ways() -> None:
    """Against every way to cut short texts into steps."""

    def seconds(rows: int) -> float:
        return max(1.0, rows / 3)

    def least(answer: tuple[int, ...], prediction: str) -> float:
        ways = [
            seconds(1 + k) + least(answer[k + 1 :], prediction)
            for k in range(len(answer))
            if "".join(map(str, answer[:k])) in prediction
        ]
        return min(ways, default=0.0)

    source = random.Random(5)
    for _ in range(60):
        answer = [source.randrange(3) for _ in range(source.randrange(2, 9))]
        prediction = [source.randrange(3) for _ in range(source.randrange(6))]
        wanted = (len(answer) - 1) / least(tuple(answer[1:]), "".join(map(str, prediction)))
        assert ceiling(answer, prediction, seconds) == pytest.approx(wanted)
