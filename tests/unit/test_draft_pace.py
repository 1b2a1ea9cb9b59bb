"""The budget of a draft model: costs by rows, learnt chances, when it stops and when it tries."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from specdec_ext.drafters.draft_target.pace import ConfidenceRates, DraftBudget
from specdec_ext.drafters.step_cost import StepCost


@dataclass
class Request:
    rates: ConfidenceRates = field(default_factory=ConfidenceRates)
    survival: list[float] = field(default_factory=list)
    may_drop: bool = True
    adaptive: bool = True
    idle: int = 0
    patience: int = DraftBudget.FIRST_PATIENCE


def taught(hits: int, tries: int, confidence: float = 0.8) -> ConfidenceRates:
    rates = ConfidenceRates()
    for i in range(tries):
        came_true = i * hits // tries != (i + 1) * hits // tries
        rates.observe(confidence, came_true)
        rates.observe_level(came_true)
    return rates


def budget(target: float, row: float, draft: float) -> DraftBudget:
    """A target pass costs `target` and each row `row` more; a draft pass costs `draft`."""
    made = DraftBudget()
    made.set_costs(StepCost({1: target, 2: target + row}), StepCost({1: draft, 2: draft * 1.01}))
    return made


def drafted(made: DraftBudget, requests: list[Request], confidence: float, limit: int) -> list[int]:
    made.begin(len(requests))
    active = requests
    for _ in range(limit):
        chosen = made.choose(active)
        active = [r for r, yes in zip(active, chosen, strict=True) if yes]
        if not active:
            break
        made.spend(len(active))
        for request in active:
            made.add(request, confidence)
    for request in requests:
        made.drop(request)
    made.end(requests)
    counts = [len(r.survival) for r in requests]
    for request in requests:
        request.survival.clear()
    return counts


def test_chances_follow_what_was_seen() -> None:
    rates = taught(15, 300)
    assert rates.rate(0.8) < 0.12
    assert rates.rate(0.2) == pytest.approx(0.18)  # nothing was seen there
    young = ConfidenceRates(rates)
    assert young.rate(0.8) == rates.rate(0.8)
    for _ in range(200):
        young.observe(0.8, True)
        young.observe_level(True)
    assert young.rate(0.8) > 0.9
    assert young.level_rate() > 0.9


def test_the_number_of_drafts_is_the_best_one() -> None:
    """Against every fixed length, in the long run, for drafts of equal chances."""
    rng = random.Random(1)
    for _ in range(60):
        rate = rng.uniform(0.2, 0.97)
        cost = {"target": 1.0, "row": rng.uniform(0.0, 0.3), "draft": rng.uniform(0.02, 0.5)}
        made = budget(**cost)
        request = Request(taught(round(rate * 1000), 1000))
        chance = request.rates.rate(0.8)
        assert request.rates.level_rate() == pytest.approx(chance, abs=0.02)
        for _ in range(150):  # the average settles
            (count,) = drafted(made, [request], 0.8, 12)
        if count == 0:
            request.idle = -1
            (count,) = drafted(made, [request], 0.8, 12)

        def speed(length: int, chance: float = chance, cost: dict[str, float] = cost) -> float:
            tokens = sum(chance**i for i in range(length + 1))
            return tokens / (cost["target"] + length * (cost["row"] + cost["draft"]))

        best = max(speed(length) for length in range(13))
        assert speed(count) >= 0.97 * best


def test_a_request_that_never_pays_tries_ever_more_rarely() -> None:
    made = budget(target=1.0, row=0.5, draft=1.0)
    request = Request(taught(2, 100))
    rounds = []
    for i in range(400):
        made.begin(1)
        if made.choose([request])[0]:
            rounds.append(i)
        made.end([])
    gaps = [b - a for a, b in itertools.pairwise(rounds)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == DraftBudget.MAX_PATIENCE


def test_the_sure_draft_and_the_others_wait() -> None:
    made = budget(target=1.0, row=0.2, draft=0.02)
    sure, doubtful = Request(taught(99, 100)), Request(taught(3, 100))
    fixed = Request(taught(3, 100), adaptive=False)
    for _ in range(3):
        counts = drafted(made, [sure, doubtful, fixed], 0.8, 6)
    assert counts[1] == 0 < counts[0]
    assert counts[2] == 6


def test_drawn_drafts_are_never_dropped_for_what_they_are() -> None:
    """Only the decision to draw on may look at confidences."""
    for may_drop in (True, False):
        made = budget(target=1.0, row=0.5, draft=0.001)
        request = Request(taught(60, 100, confidence=0.9), may_drop=may_drop)
        made.begin(1)
        made.add(request, 0.01)
        made.drop(request)
        assert len(request.survival) == (0 if may_drop else 1)


def test_a_tree_is_cut_to_what_pays_with_its_parents() -> None:
    made = budget(target=1.0, row=0.1, draft=0.01)
    made.begin(1)
    parents = [-1, -1, 0, 0, 1, 2]
    rates = [0.7, 0.2, 0.8, 0.1, 0.9, 0.9]
    kept = made.cut_tree(parents, rates)
    assert kept == [0, 1, 2, 4, 5]  # worth 0.7, 0.2, 0.56, 0.18, 0.504; a row costs 0.1
    assert made.levels(Request(taught(1, 100)), 3, 12, 4) == 0
    assert made.levels(Request(taught(99, 100)), 2, 12, 4) == 4
    assert made.levels(Request(taught(1, 100), adaptive=False), 3, 12, 4) == 4


def test_a_long_context_shortens_chains() -> None:
    """Rows of the target that are free behind a short prompt, and are not behind a long one."""
    counts = []
    for context in (100.0, 4000.0, 200_000.0):
        made = DraftBudget()
        target = StepCost({1: 1.0, 2: 1.01}, {1: 1e-5, 2: 11e-5}, 128)
        made.set_costs(target, StepCost({1: 0.02, 2: 0.021}))
        request = Request(taught(600, 1000))
        for _ in range(100):
            made.begin(1, context)
            request.survival.clear()
            while len(request.survival) < 12 and made.choose([request]) == [True]:
                made.spend(1)
                made.add(request, 0.8)
            counts_now = len(request.survival)
            made.drop(request)
            made.end([request])
        counts.append(counts_now)
    assert counts[0] > counts[1] >= counts[2]
    assert counts[0] >= 4 and counts[2] <= 1
