"""Combinations of two lists of values: those that `make test` runs, and those left to test-slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["mixed"]


def mixed(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs, for a test in which neither value decides what the other one does.

    `make test` runs as many as the longer list has, in which every value occurs; the others are
    slow tests.
    """
    firsts, seconds = list(first), list(second)
    few = min(len(firsts), len(seconds))
    return [
        pytest.param(a, b, marks=() if i % few == j % few else pytest.mark.slow)
        for i, a in enumerate(firsts)
        for j, b in enumerate(seconds)
    ]
