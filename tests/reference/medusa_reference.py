"""Medusa trees by their definition: sets of rank paths, prefixes, nothing else.

Written without the package: what is checked here shares no code with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

Path = tuple[int, ...]


def closure(paths: Sequence[Sequence[int]]) -> set[Path]:
    """The paths and all their prefixes."""
    return {tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)}


def is_prefix(a: Path, b: Path) -> bool:
    return len(a) <= len(b) and all(x == y for x, y in zip(a, b, strict=False))


def attends(nodes: Sequence[Path]) -> list[list[bool]]:
    """[n + 1, n + 1]: row i sees column j; 0 is the golden token, i + 1 is nodes[i]."""
    everyone = [(), *nodes]
    return [[is_prefix(other, node) for other in everyone] for node in everyone]


def positions(nodes: Sequence[Path]) -> list[int]:
    """Offsets to the golden token's position."""
    return [len(node) for node in [(), *nodes]]


def leaf_paths(nodes: Sequence[Path]) -> list[list[int]]:
    """For each leaf, in the order of ranks, the indices from the golden token down to it."""
    everyone = [(), *nodes]
    leaves = [n for n in nodes if not any(m != n and is_prefix(n, m) for m in nodes)]
    return [[everyone.index(leaf[:n]) for n in range(len(leaf) + 1)] for leaf in sorted(leaves)]


def draft_tokens(nodes: Sequence[Path], top: Sequence[Sequence[int]]) -> list[int]:
    """Token of each node: head d's guess of rank r, top[d][r]."""
    return [top[len(node) - 1][node[-1]] for node in nodes]


def accepted(nodes: Sequence[Path], tokens: Sequence[int], choose: dict[Path, int]) -> list[int]:
    """Greedy acceptance: the nodes, from the top, whose token is the target's choice above them.

    choose  the target's choice at each node's row, () being the golden token's
    """
    here: Path = ()
    result: list[int] = []
    while True:
        step = [i for i, n in enumerate(nodes) if n[:-1] == here and tokens[i] == choose[here]]
        if not step:
            return result
        here = nodes[step[0]]
        result.append(step[0])


def random_tree(rng: random.Random, max_nodes: int, max_depth: int, top_k: int) -> list[Path]:
    """A random valid full list in random order of growth, parents first."""
    nodes: list[Path] = []
    for _ in range(rng.randint(1, max_nodes)):
        above = rng.choice([(), *[n for n in nodes if len(n) < max_depth]])
        child = (*above, rng.randrange(top_k))
        if child not in nodes:
            nodes.append(child)
    return nodes


class Rates:
    """How often each head's guess of each rank was right; older observations fade.

    prior   rates to start from, [heads][ranks], `weight` observations' worth of them
    memory  observations of a head that count
    """

    def __init__(self, prior: Sequence[Sequence[float]], weight: float, memory: float) -> None:
        self.memory = memory
        self.hits = [[rate * weight for rate in row] for row in prior]
        self.trials = [weight for _ in prior]

    def observe(self, head: int, guesses: Sequence[int], token: int) -> bool:
        """The token behind the guesses of `head` is known; False if it was not among them."""
        if self.trials[head] >= self.memory:
            keep = (self.memory - 1.0) / self.trials[head]
            self.hits[head] = [hits * keep for hits in self.hits[head]]
            self.trials[head] *= keep
        self.trials[head] += 1.0
        if token not in guesses:
            return False
        self.hits[head][list(guesses).index(token)] += 1.0
        return True

    def worth(self, node: Path) -> float:
        result = 1.0
        for head, rank in enumerate(node):
            result *= self.hits[head][rank] / max(self.trials[head], 1e-9)
        return result


class Request:
    """One request over its steps: what it drafts, and what it learns of the text."""

    def __init__(
        self, nodes: Sequence[Path], adaptive: bool, prior: Sequence[Sequence[float]]
    ) -> None:
        self.given, self.adaptive = list(nodes), adaptive
        self.rates = Rates(prior, 24.0, 128.0)
        self.steps = 0
        self.nodes: list[Path] = []
        self.estimates: list[float] = []
        # (tokens in front, guesses of each head, the head whose token is awaited)
        self.pending: list[tuple[int, list[list[int]], int]] = []

    def learn(self, text: Sequence[int], measured: Rates) -> None:
        left = []
        for start, guesses, first in self.pending:
            head = first
            while head < len(guesses) and start + head < len(text):
                token = text[start + head]
                measured.observe(head, guesses[head], token)
                alive = self.rates.observe(head, guesses[head], token)
                head = head + 1 if alive else len(guesses)
            if head < len(guesses):
                left.append((start, guesses, head))
        self.pending = left

    def draft(
        self, text: Sequence[int], most: int, top: Sequence[Sequence[int]], seen: int
    ) -> tuple[list[Path], list[int], list[float]]:
        """(nodes, tokens, estimates) of a step; top[h]: head h's guesses, best first; `seen` of
        them are held against the text, or as many as the nodes need."""
        if self.steps % 16 == 0:
            worth = {node: self.rates.worth(node) for node in self.given}
            self.nodes = list(self.given)
            if self.adaptive:
                self.nodes.sort(key=lambda node: -worth[node])
            self.estimates = [worth[node] for node in self.nodes]
        self.steps += 1
        nodes = self.nodes[:most]
        heads = max(map(len, nodes))
        ranks = max(seen, *(node[-1] + 1 for node in nodes))
        self.pending.append((len(text), [list(row[:ranks]) for row in top[:heads]], 0))
        return nodes, draft_tokens(nodes, top), self.estimates[: len(nodes)]
