"""Which drafts are worth a row: against trying every number, and what is learnt from acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_ext.drafters.redrafter.beam_budget import BeamBudget
from specdec_ext.drafters.step_cost import StepCost

LINEAR = {1: 10.0, 2: 11.0, 4: 13.0, 8: 17.0, 16: 25.0}


def tree(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(depths, log-probabilities), a parent before its children and at least as likely."""
    depths, logs = np.ones(size, np.int64), np.zeros(size)
    for node in range(size):
        parent = int(rng.integers(-1, node)) if node else -1
        depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
        logs[node] = (logs[parent] if parent >= 0 else 0.0) + np.log(rng.uniform(0.05, 0.9))
    return depths, logs


def time_of(table: dict[int, float], rows: int) -> float:
    known = sorted(table)
    if rows >= known[-1]:
        a, b = known[-2:]
        return table[b] + (rows - b) * (table[b] - table[a]) / (b - a)
    low = max(r for r in known if r <= rows)
    high = min(r for r in known if r > rows)
    return table[low] + (rows - low) * (table[high] - table[low]) / (high - low)


@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0, 5.0])
def test_the_choice_is_the_best_of_all_cuts(slope: float) -> None:
    rng = np.random.default_rng(int(slope * 10))
    table = {rows: 10.0 + slope * (rows - 1) for rows in (1, 2, 4, 9, 30)}
    for _ in range(300):
        trees = [tree(rng, int(rng.integers(0, 9))) for _ in range(int(rng.integers(1, 4)))]
        budget = BeamBudget()
        budget.set_step_cost(StepCost(table))
        drafting = float(rng.uniform(0, 3))
        budget.note_pass(drafting)
        kept = budget.choose(trees, passes=2, other_rows=1)
        batch = len(trees)

        def speed(counts: list[int], trees=trees, batch=batch, drafting=drafting) -> float:
            gain = sum(
                np.sort(np.exp(logs))[::-1][:n].sum()
                for (_, logs), n in zip(trees, counts, strict=True)
            )
            rows = batch + 1 + sum(counts)
            return float((batch + gain) / (time_of(table, rows) + 2 * drafting))

        every = [[]]
        for depths, _ in trees:
            every = [[*front, n] for front in every for n in range(len(depths) + 1)]
        assert speed(kept) == pytest.approx(max(map(speed, every)), rel=1e-12)


def test_without_a_step_cost_everything_is_kept() -> None:
    budget = BeamBudget()
    assert not budget.known
    trees = [tree(np.random.default_rng(0), 5), tree(np.random.default_rng(1), 0)]
    assert budget.choose(trees, passes=3) == [5, 0]
    assert budget.wants_drafts(1) and budget.depth_gains(1, 5) == []


def test_a_drafter_that_is_too_sure_of_itself_is_found_out() -> None:
    budget = BeamBudget()
    budget.set_step_cost(StepCost(LINEAR))
    chain = (np.arange(1, 5), np.log([0.9, 0.8, 0.7, 0.6]))
    assert budget.choose([chain], passes=0) == [4]
    for _ in range(200):  # nothing of it is ever kept
        budget.observe(np.exp(chain[1]).tolist(), 0)
    assert budget.choose([chain], passes=0) == [0]
    for _ in range(200):  # and then everything
        budget.observe(np.exp(chain[1]).tolist(), 4)
    assert budget.choose([chain], passes=0) == [4]


def test_only_the_first_draft_is_any_good() -> None:
    budget = BeamBudget()
    budget.set_step_cost(StepCost(LINEAR))
    chain = (np.arange(1, 5), np.log([0.9, 0.8, 0.7, 0.6]))
    for _ in range(200):
        budget.observe(np.exp(chain[1]).tolist(), 1)
    assert budget.choose([chain], passes=0) == [1]
    budget.note_pass(1.0)
    assert budget.pass_seconds == 1.0
    # Behind the first draft nothing is kept, so a pass for a third is not worth its second.
    gains = budget.depth_gains(1, 4)
    assert len(gains) == 3 and 0.9 * gains[1] < 1.0
    # What is not tried is believed again after a while.
    for _ in range(400):
        budget.observe([0.9], 1)
    assert 0.9 * budget.depth_gains(1, 4)[1] >= 1.0
    # In a batch a pass of the drafter serves everybody, and so does a step of the target.
    assert budget.depth_gains(4, 4)[0] == pytest.approx(budget.depth_gains(1, 4)[0] * 13 / 10 / 4)


def test_where_drafting_does_not_pay_it_is_tried_now_and_then() -> None:
    budget = BeamBudget()
    budget.set_step_cost(StepCost(LINEAR))
    budget.note_pass(30.0)  # a pass of the drafter costs three of the target's
    chain = (np.arange(1, 3), np.log([0.9, 0.8]))
    tries = 0
    for _ in range(320):
        if budget.wants_drafts(1):
            budget.choose([chain], passes=2)
            tries += 1
    assert 15 <= tries <= 25 and budget.skipped == 320 - tries
    # A batch of another size is judged on its own.
    assert budget.wants_drafts(8)


@pytest.mark.parametrize(("chance", "pays"), [(0.115, False), (0.2, True)])
def test_what_hardly_pays_is_not_worth_it(chance: float, pays: bool) -> None:
    """A step has more to do than the two networks: it takes more than an even expectation."""
    budget = BeamBudget()
    budget.set_step_cost(StepCost(LINEAR))
    budget.note_pass(0.01)
    draft = (np.array([1]), np.log([chance]))
    tries = 0
    for _ in range(160):
        if budget.wants_drafts(1):
            # Verified for 1.1 steps' time, it brings 1 + chance tokens: more than 1.1.
            assert budget.choose([draft], passes=1) == [1]
            tries += 1
    assert (tries == 160) is pays and tries >= 10


def test_beams_that_nobody_verifies_are_not_searched() -> None:
    budget = BeamBudget()
    assert budget.num_beams(1) is None  # as many as are asked for
    budget.set_step_cost(StepCost(LINEAR))
    assert budget.num_beams(1) == 2  # a new engine begins small
    searched = []
    for _ in range(6):  # everything that is searched is worth a row: more, step by step
        searched.append(budget.num_beams(1))
        budget.note_beams(1, min(searched[-1], 5))
    assert searched == [2, 3, 4, 5, 6, 6]
    assert budget.num_beams(8) == 2  # another batch size is judged on its own
    for _ in range(100):
        budget.note_beams(1, 1)
    assert budget.num_beams(1) == 2
    for _ in range(100):  # nothing pays: one, to see whether that changes
        budget.note_beams(1, 0)
    assert budget.num_beams(1) == 1


def test_a_long_context_makes_rows_dear() -> None:
    budget = BeamBudget()
    budget.set_step_cost(StepCost({1: 1.0, 65: 1.1}, {1: 1e-4, 65: 65e-4}, 128))
    tree = (np.array([1, 2, 3, 4]), np.log([0.6, 0.4, 0.3, 0.2]))
    kept = []
    for context in (100, 2000, 100_000):
        budget.begin(1, context)
        kept += budget.choose([tree], passes=1)
    assert kept[0] == 4 > kept[1] > kept[2] == 0
