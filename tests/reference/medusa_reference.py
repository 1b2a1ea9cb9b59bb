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
