"""Stop strings over text that arrives in pieces.

Every stop string runs its Knuth-Morris-Pratt automaton over the text, so the cost is linear in the
text whatever the pieces are. The automaton's state is how many of the last characters could still
become that stop string: a stream holds exactly those back, so it never shows text that a stop would
cut away, and nothing longer.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


def _failure(pattern: str) -> list[int]:
    """failure[i]: length of the longest proper border of pattern[:i + 1]."""
    failure = [0] * len(pattern)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[i] != pattern[k]:
            k = failure[k - 1]
        k += pattern[i] == pattern[k]
        failure[i] = k
    return failure


class StopStrings:
    """Finds the stop string that completes first; of several at one character, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(stops)
        self._failures = [_failure(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)

    @property
    def held_chars(self) -> int:
        """Last characters of the text so far that may be the beginning of a stop string."""
        return max(self._states, default=0)

    def save(self) -> list[int]:
        """Where it stands, for restore()."""
        return list(self._states)

    def restore(self, saved: list[int]) -> None:
        """Go back to where it stood."""
        self._states = saved

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[int, str] | None:
        """Read the next piece. Returns (characters of `text` up to the stop's end, stop) or None.

        With may_stop False (before min_tokens) a stop string that completes here is passed over;
        one that only begins here may still stop a later piece.
        """
        if not self._stops:
            return None
        for pos, char in enumerate(text):
            found: str | None = None
            for i, stop in enumerate(self._stops):
                state = self._states[i]
                failure = self._failures[i]
                if state == len(stop):  # it completed where it was not allowed to stop
                    state = failure[state - 1]
                while state and char != stop[state]:
                    state = failure[state - 1]
                state += char == stop[state]
                self._states[i] = state
                if state == len(stop) and (found is None or len(stop) > len(found)):
                    found = stop
            if found is not None:
                if may_stop:
                    return pos + 1, found
                for i, stop in enumerate(self._stops):
                    if self._states[i] == len(stop):
                        self._states[i] = self._failures[i][-1]
        return None
