"""Prompt lookup in plain Python: the external loop's pool to the letter ("V1"), and brute force.

Shares nothing with the core.
"""

from __future__ import annotations


class V1Pool:
    """TensorRT-LLM's PLDPool as described: pattern -> ordered set of continuations."""

    def __init__(self, k: int, m: int, keep_all: bool = True, use_oldest: bool = True):
        self.k, self.m, self.keep_all, self.use_oldest = k, m, keep_all, use_oldest
        self.pool: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self.seen = 0

    def update(self, text: list[int]) -> None:
        start = max(0, self.seen - (self.k + self.m - 1))
        for size in range(min(self.m, len(text) - 1), 0, -1):
            for p in range(start, len(text) - size):
                pattern = tuple(text[p : p + size])
                after = tuple(text[p + size : p + size + self.k])
                stored = self.pool.get(pattern)
                if stored is None or not self.keep_all or len(stored[0]) < self.k:
                    self.pool[pattern] = [after]
                elif after not in stored:
                    stored.append(after)
        self.seen = len(text)

    def query(self, text: list[int]) -> list[int]:
        for size in range(min(self.m, len(text) - 1), 0, -1):
            stored = self.pool.get(tuple(text[len(text) - size :]))
            if stored:
                return list(stored[0] if self.use_oldest else stored[-1])
        return []


def occurrences(text: list[int], size: int) -> list[int]:
    """Positions behind every earlier occurrence of the last `size` tokens, ascending."""
    suffix = text[len(text) - size :]
    return [p + size for p in range(len(text) - size) if text[p : p + size] == suffix]


def lookup(
    text: list[int], k: int, m: int, keep_all: bool, use_oldest: bool
) -> tuple[int, int, int]:
    """(source, length, match_len) by scanning the whole text."""
    if k <= 0:
        return 0, 0, 0
    for size in range(min(m, len(text) - 1), 0, -1):
        found = occurrences(text, size)
        if found:
            source = found[-1]
            if keep_all and use_oldest and len(text) - found[0] >= k:
                source = found[0]
            return source, min(k, len(text) - source), size
    return 0, 0, 0
