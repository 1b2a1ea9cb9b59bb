"""A user's drafter for tests of equality."""

from __future__ import annotations


class LastTokens:
    """It repeats what came before, right or wrong."""

    def propose(self, history: list[int], budget: int) -> list[int]:
        return list(history[-budget - 3 : -3])
