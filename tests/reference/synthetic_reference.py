"""Synthetic acceptance by the book, one node after another. Shares no code with cpp/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .acceptance_reference import uniform

SYNTHETIC = 6  # the purpose of the random number


@dataclass(frozen=True)
class Kept:
    """path: accepted rows downwards; decided: the token after each row that has one."""

    path: list[int]
    decided: dict[int, int]
    emitted: list[int]


def keep(
    tokens: Sequence[int],
    parents: Sequence[int],
    rates: Sequence[float],
    seed: int,
    position: int,
    choice: Callable[[int, int], int],
    vocab: int,
) -> Kept:
    """Row 0 is the golden token (parent -1); `position` that of the token after it.

    choice(row, depth): what the target says after that row; negative: nothing.
    """

    def ancestors(row: int) -> list[int]:
        return [] if row <= 0 else [*ancestors(parents[row]), row]

    deepest = max(range(len(tokens)), key=lambda row: (len(ancestors(row)), -row))
    u = uniform(seed, position, SYNTHETIC)
    wanted = next((i for i, rate in enumerate(rates) if not u < rate), len(rates))
    path: list[int] = []
    decided: dict[int, int] = {}
    for row in [0, *ancestors(deepest)]:
        if row > 0:
            path.append(row)
        token = choice(row, len(path))
        if token < 0 or len(path) == wanted or row == deepest:
            break
    last = path[-1] if path else 0
    children = {tokens[i] for i in range(1, len(tokens)) if parents[i] == last}
    if token >= 0 and len(children) < vocab:
        while token in children:
            token = (token + 1) % vocab
    for row, after in zip([0, *path[:-1]], path, strict=False):
        decided[row] = tokens[after]
    decided[last] = token
    emitted = [tokens[row] for row in path] + ([token] if token >= 0 else [])
    return Kept(path, decided, emitted)
