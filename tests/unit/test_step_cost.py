"""T(rows) between, before and behind the measured points."""

from __future__ import annotations

import pytest

from specdec_ext.drafters.step_cost import StepCost


def test_linear_between_the_points_and_never_falling() -> None:
    cost = StepCost({1: 1.0, 2: 2.0, 4: 1.5, 8: 6.0})
    rows = (0, 1, 2, 3, 4, 6, 8)
    assert [cost(n) for n in rows] == [1, 1, 2, 2, 2, 4, 6]
    assert cost.seconds(0, 8).tolist() == [cost(n) for n in range(9)]


def test_behind_the_last_point_it_grows_as_over_the_last_four() -> None:
    # 1 -> 3 over rows 2..8; the first point does not count, nor one wild pair alone.
    cost = StepCost({1: 0.5, 2: 1.0, 4: 1.2, 6: 1.2, 8: 4.0})
    assert [cost(n) for n in (8, 9, 20)] == pytest.approx([4.0, 4.5, 10.0])
    assert cost.seconds(7, 5).tolist() == pytest.approx([cost(n) for n in range(7, 13)])


def test_two_points_and_the_order_of_the_table_are_enough() -> None:
    cost = StepCost({4: 2.0, 2: 1.0})
    assert [cost(n) for n in (0, 1, 2, 3, 4, 6)] == [1, 1, 1, 1.5, 2, 3]
