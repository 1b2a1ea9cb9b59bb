"""Random programs (schedule_machine.py) for every method, place and depth."""

from __future__ import annotations

import pytest
from schedule_machine import METHODS, Schedule, run_programs


@pytest.mark.parametrize("method", METHODS)
def test_random_programs(method: str) -> None:
    seen = run_programs(Schedule, 40, method=method)
    # Well below what they come to: Hypothesis mixes numbers of the sources into what it draws.
    assert seen["compared"] > 400 and seen["by the host"] > 200
    assert seen["failed"] > 0 and seen["replayed"] > 8
    assert method == "none" or seen["accepted"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_many_random_programs(method: str) -> None:
    seen = run_programs(Schedule, 3000, method=method)
    assert seen["compared"] > 30_000
