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


def test_a_longer_context_costs_what_was_measured_for_each_request() -> None:
    cost = StepCost({1: 1.0, 4: 4.0, 8: 6.0}, {1: 0.01, 4: 0.02, 8: 0.04}, 100)
    assert [cost.at(1, 292)(n) for n in (1, 4, 6, 8)] == pytest.approx(
        [1 + 192 * 0.01, 4 + 192 * 0.02, 5 + 192 * 0.03, 6 + 192 * 0.04]
    )
    assert cost.at(2, 292)(8) == pytest.approx(6 + 2 * 192 * 0.02)
    assert cost.at(4, 292)(4) == pytest.approx(4 + 4 * 192 * 0.01)
    assert cost.at(1, 292).seconds(1, 7).tolist() == pytest.approx(
        [cost.at(1, 292)(n) for n in range(1, 9)]
    )


def test_a_shorter_context_and_a_table_without_growth_change_nothing() -> None:
    cost = StepCost({1: 1.0, 4: 4.0}, {1: 0.01, 4: 0.02}, 100)
    assert cost.at(1, 0) is cost and cost.at(1, 100) is cost and cost.at(0, 1e6) is cost
    plain = StepCost({1: 1.0, 4: 4.0})
    assert plain.at(3, 1e6) is plain


def test_contexts_that_hardly_differ_share_a_table() -> None:
    cost = StepCost({1: 1.0, 4: 4.0}, {1: 0.01, 4: 0.02}, 100)
    assert cost.at(2, 230) is cost.at(2, 290)
    assert cost.at(2, 230) is not cost.at(2, 300)
    assert cost.at(2, 230)(4) < cost.at(3, 230)(4)


def test_what_a_table_may_be() -> None:
    cost = StepCost({1: 1.0, 4: 4.0})
    assert StepCost.of(cost) is cost
    assert StepCost.of({1: 1.0}) is None
    made = StepCost.of({1: 1.0, 2: 2.0})
    assert made is not None and made(2) == 2.0
