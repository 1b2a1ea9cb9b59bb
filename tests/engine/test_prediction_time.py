"""What a predicted output saves, in simulated time (simulated_time.py)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import simulated_time as simulated

from specdec_ext import _core

TOKENS = 400
CHEAP = _core.StepCost({1: 7.7, 7: 8.2, 11: 8.6, 16: 11.2, 32: 20.6, 84: 52.5, 1024: 600.0})


def edited(every: int, seed: int) -> Callable[[list[int]], list[int]]:
    """A prediction that differs from the output at about one place in `every`; 0: the output's
    tokens in another order."""

    def change(output: list[int]) -> list[int]:
        source = random.Random(seed)
        if every == 0:
            return source.sample(output, len(output))
        result = []
        for token in output:
            other = source.randrange(simulated.VOCAB)
            what = source.randrange(3 * every)  # replaced, left out, or put in
            result += [[other], [], [token, other]][what] if what < 3 else [token]
        return result

    return change


def gain(every: int, seconds: Any = simulated.SECONDS) -> float:
    """Plain decoding's seconds over those with such predictions: six texts that repeat nothing."""
    plain = drafted = 0.0
    for seed in range(6):
        how = {"method": "none", "repeats": 0.0, "seconds": seconds}
        times = simulated.guessed_times()
        for _ in range(2):
            one = simulated.run([20 + seed], TOKENS, times=times, **how)
        plain += one.decode_seconds
        other = simulated.run(
            [20 + seed], TOKENS, times=times, predictions=edited(every, seed), **how
        )
        assert other.texts == one.texts
        drafted += other.decode_seconds
    return plain / drafted


# With a cursor that proposed nothing until three tokens agreed, and chances by depth, these were
# 1.42, 1.85 and 2.90; the last one has nothing to learn.
@pytest.mark.parametrize(("every", "least"), [(6, 1.55), (12, 1.95), (40, 3.0), (10**6, 4.1)])
def test_what_a_prediction_saves(every: int, least: float) -> None:
    assert gain(every) >= least


# Rows are nearly free up to eleven, as with 16-bit weights: 1.87, 2.91 and 5.91 before.
@pytest.mark.parametrize(("every", "least"), [(6, 2.7), (12, 4.0), (40, 7.0)])
def test_what_a_prediction_saves_where_rows_are_cheap(every: int, least: float) -> None:
    assert gain(every, CHEAP) >= least


@pytest.mark.parametrize("seconds", [simulated.SECONDS, CHEAP], ids=["dear", "cheap"])
def test_a_useless_prediction_is_never_slower(seconds: Any) -> None:
    """Its tokens are the text's in another order, so that single ones agree all the time."""
    assert gain(0, seconds) >= 0.98
