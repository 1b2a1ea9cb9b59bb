"""Random programs (schedule_machine.py) for every method, place and depth."""

from __future__ import annotations

import pytest
from schedule_machine import METHODS, Schedule, run_programs


@pytest.mark.parametrize("method", METHODS)
def test_random_programs(method: str) -> None:
    seen = run_programs(Schedule, 100, method=method)
    assert seen["compared"] > 3500 and seen["by the host"] > 2000
    assert seen["failed"] > 1 and seen["replayed"] > 150 and seen["hits"] > 1
    assert method == "none" or seen["accepted"] > 600


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_many_random_programs(method: str) -> None:
    seen = run_programs(Schedule, 3000, method=method)
    assert seen["compared"] > 75_000
