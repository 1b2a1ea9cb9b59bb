"""The one law of a step's time, T(rows, context), and the one draft budget, through both users."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdec_ext._core import StepCost

TABLE = {1: 0.5, 2: 1.0, 4: 1.2, 6: 1.2, 8: 4.0}
GROWTH = {1: 0.01, 2: 0.02, 4: 0.02, 6: 0.02, 8: 0.04}


def test_linear_between_the_points_and_never_falling() -> None:
    cost = StepCost({1: 1.0, 2: 2.0, 4: 1.5, 8: 6.0})
    rows = (0, 1, 2, 3, 4, 6, 8)
    # 2 rows cannot take longer than 4: what was measured too slow gives way.
    assert [cost(n) for n in rows] == [1, 1, 1.5, 1.5, 1.5, 3.75, 6]
    assert cost.seconds(0, 8).tolist() == [cost(n) for n in range(9)]
    assert cost(3.5) == 1.5 and cost(7.5) == 5.4375


def test_behind_the_last_point_it_grows_as_over_the_last_four() -> None:
    # 1 -> 4 over rows 2..8; the first point does not count, nor one wild pair alone.
    cost = StepCost(TABLE)
    assert [cost(n) for n in (8, 9, 20)] == pytest.approx([4.0, 4.5, 10.0])
    assert cost.seconds(7, 5).tolist() == pytest.approx([cost(n) for n in range(7, 13)])


def test_a_longer_context_costs_what_was_measured_for_each_request() -> None:
    cost = StepCost({1: 1.0, 4: 4.0, 8: 6.0}, {1: 0.01, 4: 0.02, 8: 0.04}, 100)
    assert [cost.at(1, 300)(n) for n in (1, 4, 6, 8)] == pytest.approx(
        [1 + 200 * 0.01, 4 + 200 * 0.02, 5 + 200 * 0.03, 6 + 200 * 0.04]
    )
    assert cost.at(2, 300)(8) == pytest.approx(6 + 2 * 200 * 0.02)
    assert cost.at(4, 300)(4) == pytest.approx(4 + 4 * 200 * 0.01)
    for same in (cost.at(1, 0), cost.at(1, 100), cost.at(0, 1e6)):
        assert same.columns[:2] == cost.columns[:2]
    plain = StepCost({1: 1.0, 4: 4.0})
    assert plain.at(3, 1e6)(9) == plain(9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({1: 1.0},), "give at least two of each"),
        (({2: 1.0, 4: 2.0},), r"rows\[0\] = 2: must be 1"),
        (({1: 1.0, 2: 0.0},), r"seconds\[1\] = 0: must be positive"),
        (({1: 1.0, 2: math.nan},), r"seconds\[1\] = nan"),
        (({1: 1.0, 2: math.inf},), r"seconds\[1\] = inf"),
        (({1: 1.0, 2: 2.0}, {1: 0.1, 3: 0.2}), "growth has 3 rows"),
        (({1: 1.0, 2: 2.0}, {1: 0.1}), r"growth has 1 entries, rows has 2"),
        (({1: 1.0, 2: 2.0}, {1: 0.1, 2: math.nan}), r"growth\[1\] = nan"),
        (({1: 1.0, 2: 2.0}, {}, -1.0), "context_len = -1"),
    ],
)
def test_what_a_table_may_be(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCost(*arguments)


def test_a_table_is_a_dict_of_numbers() -> None:
    for table in ({1: "a", 2: 1.0}, {1: 1.0, 1 << 70: 2.0}, {"x": 1.0, 2: 2.0}):
        with pytest.raises(TypeError, match="a table is a dict of row counts and seconds"):
            StepCost(table)  # type: ignore[arg-type]
