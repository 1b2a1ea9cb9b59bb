"""What the nodes of a static tree are worth, by what was accepted.

A node is worth the probability that a step accepts it: the product, along its path, of the rates at
which each head's guess of that rank was right. A child is never worth more than its parent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...config.medusa_choices import Choice, MedusaTree, medusa_tree

__all__ = ["GuessRates", "TreeLayout", "likeliest_first", "tree_layout"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class TreeLayout:
    """A tree as index arrays.

    heads, ranks  [n]: node i is rank ranks[i] of head heads[i]
    parents       [n]: index of its parent, -1 for the golden token
    num_heads     [n + 1]: heads, and the best so many guesses of each, that the first nodes need
    top_k
    """

    def __init__(self, tree: MedusaTree) -> None:
        self.tree = tree
        self.size = len(tree.choices)
        self.depth = tree.depth
        self.max_top_k = max(tree.top_k)
        self.heads: Ints = np.array([len(c) - 1 for c in tree.choices], dtype=np.int64)
        self.ranks: Ints = np.array([c[-1] for c in tree.choices], dtype=np.int64)
        self.parents: Ints = np.array(tree.parents, dtype=np.int64)
        self.num_heads = [0, *(np.maximum.accumulate(self.heads) + 1).tolist()]
        self.top_k = [0, *(np.maximum.accumulate(self.ranks) + 1).tolist()]
        # Path of each node as (head, rank) pairs, padded with a pair whose rate is 1.
        depth = self.depth
        self._path_heads = np.full((self.size, depth), depth, dtype=np.int64)
        self._path_ranks = np.zeros((self.size, depth), dtype=np.int64)
        for i, choice in enumerate(tree.choices):
            self._path_heads[i, : len(choice)] = np.arange(len(choice))
            self._path_ranks[i, : len(choice)] = choice

    def worth(self, rates: Floats) -> Floats:
        """[n]: the probability that each node is accepted; rates [>= depth, >= max_top_k]."""
        padded = np.ones((self.depth + 1, self.max_top_k))
        padded[:-1] = rates[: self.depth, : self.max_top_k]
        result: Floats = padded[self._path_heads, self._path_ranks].prod(axis=1)
        return result


@functools.lru_cache(maxsize=256)
def tree_layout(choices: tuple[Choice, ...]) -> TreeLayout:
    """The layout of choices as parse_choices() returns them."""
    return TreeLayout(medusa_tree(choices))


def likeliest_first(choices: tuple[Choice, ...], rates: Floats) -> tuple[Choice, ...]:
    """The choices in the order in which a growing budget takes them, parents before children.

    rates  [heads, ranks] of all heads and ranks that occur
    """
    # Stable: of equal ones the earlier, so a parent, comes first. Rounding makes no child likelier:
    # its product is the parent's with a factor of at most 1 in the place of a 1.
    order = np.argsort(-tree_layout(choices).worth(rates), kind="stable")
    return tuple(choices[i] for i in order)


class GuessRates:
    """How often each head's guess of each rank was right, among the texts seen lately.

    A head is asked only where all heads before it had the true token among their guesses: that is
    where a node of it can be accepted.

    prior   rates to start from, [heads, ranks]; `weight` observations' worth of them
    memory  observations that count; older ones fade
    """

    def __init__(self, prior: Floats, weight: float, memory: float = 128.0) -> None:
        self._memory = memory
        self._hits: Floats = prior * weight
        self._trials: Floats = np.full(prior.shape[0], weight)

    def observe(self, guesses: Sequence[Sequence[int]], head: int, token: int) -> bool:
        """The token behind guesses[head] is known; False if it was not among them."""
        trials, hits = self._trials, self._hits
        if trials[head] >= self._memory:
            keep = (self._memory - 1.0) / trials[head]
            hits[head] *= keep
            trials[head] *= keep
        trials[head] += 1.0
        try:
            rank = guesses[head].index(token)
        except ValueError:
            return False
        hits[head, rank] += 1.0
        return True

    def rates(self) -> Floats:
        """[heads, ranks]; the ranks of a head sum to at most 1."""
        result: Floats = self._hits / np.maximum(self._trials, 1e-9)[:, None]
        return result

    @property
    def trials(self) -> list[float]:
        """Observations of each head."""
        result: list[float] = self._trials.tolist()
        return result
