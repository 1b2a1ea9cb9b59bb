"""Drafts beside rows of prompts: weighed by what they add to that step, never slower in total.

No clock: a simulated model takes what a table says (simulated_time.py), and a ratio is plain
decoding's seconds over those of the same schedule with drafts, prompts counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import simulated_time as simulated

from specdec_ext import _core

NEVER_SLOWER = 0.98
EIGHT = [400, 645, 426, 586, 515, 534, 632, 455]
# Rows are nearly free up to 64, as on a device.
FLAT = _core.StepCost({1: 5.0, 64: 5.5, 1024: 40.0})


def both(*args: Any, **how: Any) -> tuple[simulated.Schedule, simulated.Schedule]:
    """Plain decoding and suffix decoding, after a first schedule that taught each its times."""
    seen = {}
    for method in ("none", "suffix"):
        times = simulated.guessed_times()
        for _ in range(2):
            seen[method] = simulated.run(*args, method=method, times=times, **how)
    assert seen["none"].texts == seen["suffix"].texts
    return seen["none"], seen["suffix"]


@pytest.mark.parametrize("repeats", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("slowdown", [0.0, 2.0, 4.0, 8.0])
def test_eight_long_prompts_are_never_slower(slowdown: float, repeats: float) -> None:
    """With T of a whole step as the price of a token these were 0.87 to 0.93 at 0.6 and 0.8."""
    plain, drafted = both(EIGHT, 128, slowdown=slowdown, repeats=repeats)
    assert plain.seconds / drafted.seconds >= NEVER_SLOWER


@pytest.mark.parametrize(
    "case",
    [
        {"prompts": [450], "max_tokens": 128},
        {"prompts": EIGHT[:4], "max_tokens": 128},
        {"prompts": EIGHT * 4, "max_tokens": 128},
        {"prompts": EIGHT * 2, "max_tokens": 64, "arrivals": [20 * i for i in range(16)]},
        {"prompts": [50, 4000], "max_tokens": [600, 2], "arrivals": [0, 10]},
    ],
    ids=["1", "4", "32", "one after the other", "one long prompt"],
)
def test_other_schedules_are_never_slower(case: dict[str, Any]) -> None:
    plain, drafted = both(**case)
    assert plain.seconds / drafted.seconds >= NEVER_SLOWER
    assert plain.prompts_read / drafted.prompts_read >= 0.9


def test_drafts_still_pay() -> None:
    plain, drafted = both([450], 128)
    assert plain.seconds / drafted.seconds > 1.2
    # One long text decodes beside a prompt that is read in many steps: its drafts are worth theirs.
    plain, drafted = both([50, 4000], [600, 2], arrivals=[0, 10])
    assert plain.seconds / drafted.seconds > 1.1
    # Where rows beside prompts are free they are taken there, too.
    plain, drafted = both(EIGHT, 128, seconds=FLAT)
    assert plain.seconds / drafted.seconds > 1.25
