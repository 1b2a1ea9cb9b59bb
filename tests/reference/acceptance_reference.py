"""Acceptance of drafts by the book: float64, whole rows, one draft after another. Shares no code
with cpp/.

Each rule returns (path, token, margin): accepted drafts downwards, the token after them, and how
close the nearest decision was, as a probability: what float32 weights may not have decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sampling_reference import Law, philox4x32, probabilities

_M = 0xFFFFFFFF
TOKEN, ACCEPT, DRAFT = 3, 4, 5


def uniform(seed: int, position: int, purpose: int, draw: int = 0) -> float:
    """The number in [0, 1) of (seed, position, purpose, draw)."""
    words = philox4x32((position & _M, position >> 32, purpose, draw), (seed & _M, seed >> 32))
    return ((words[0] << 21) | (words[1] >> 11)) / 2.0**53


@dataclass
class Drafts:
    """One proposal: tokens, parents (-1: the golden token), what each was drawn from [n, V]."""

    tokens: Sequence[int]
    parents: Sequence[int]
    probs: np.ndarray | None = None
    replacement: bool = False

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def drawn_from(self, draft: int, earlier: Sequence[int]) -> np.ndarray:
        """The law of `draft`, given that the siblings `earlier` were drawn before it."""
        assert self.probs is not None
        q = self.probs[draft].astype(np.float64)
        if not self.replacement:
            q[[self.tokens[i] for i in earlier]] = 0.0
        return q / q.sum()


def expand(probs: np.ndarray, vocab_ids: Sequence[int], vocab: int) -> np.ndarray:
    """Rows over a reduced vocabulary as rows over the whole one."""
    rows = np.zeros((len(probs), vocab))
    rows[:, list(vocab_ids)] = probs
    return rows


def select(p: np.ndarray, u: float) -> tuple[int, float]:
    """The token that u selects from the law p, and how far u is from the next step."""
    steps = np.cumsum(p / p.sum())
    steps[np.flatnonzero(p > 0)[-1] :] = 1.0
    token = int(np.searchsorted(steps, u, side="right"))
    return token, float(np.abs(steps - u).min())


def rejection(
    drafts: Drafts, scores: np.ndarray, law: Law, seed: int, position: int
) -> tuple[list[int], int, float]:
    """Recursive rejection over siblings; scores [n + 1, V], row 0 after the golden token."""
    path: list[int] = []
    margin, node = 1.0, -1
    while True:
        at = position + len(path)
        r = probabilities(scores[node + 1], law)
        siblings = drafts.children(node)
        for i, child in enumerate(siblings):
            token = drafts.tokens[child]
            q = drafts.drawn_from(child, siblings[:i])
            u = uniform(seed, at, ACCEPT, i)
            margin = min(margin, abs(u * q[token] - r[token]))
            if u * q[token] < r[token]:
                path.append(child)
                node = child
                break
            r = np.maximum(r - q, 0.0)
            margin = min(margin, r.sum())
            r /= r.sum()
        else:
            token, step = select(r, uniform(seed, at, TOKEN))
            return path, token, min(margin, step)


def deepest(
    drafts: Drafts,
    scores: np.ndarray,
    law: Law,
    seed: int,
    position: int,
    *,
    typical: tuple[float, float] | None = None,
    threshold: float | None = None,
) -> tuple[list[int], int, float]:
    """The lossy rules: typical = (posterior_threshold, posterior_alpha), or a constant threshold.

    Of all paths of acceptable drafts the deepest, then the likeliest, then the first.
    """
    margin = 1.0
    found: list[tuple[int, float, list[int]]] = [(0, 1.0, [])]

    def descend(node: int, path: list[int], product: float) -> None:
        nonlocal margin
        p = probabilities(scores[node + 1], law)
        siblings = drafts.children(node)
        for i, child in enumerate(siblings):
            own, q = p[drafts.tokens[child]], 1.0
            if typical is not None:
                inside = p[p > 0]
                entropy = -(inside * np.log(inside)).sum()
                least = min(typical[0], typical[1] * float(np.exp(-entropy)))
            else:
                assert threshold is not None
                least = threshold
                if drafts.probs is not None:
                    q = drafts.drawn_from(child, siblings[:i])[drafts.tokens[child]]
            margin = min(margin, abs(own - least * q) if own > 0 else 1.0)
            if own > 0 and own >= least * q:
                here = [*path, child]
                found.append((len(here), product * own, here))
                descend(child, here, product * own)

    descend(-1, [], 1.0)
    depth = max(entry[0] for entry in found)
    best = [entry for entry in found if entry[0] == depth]
    best.sort(key=lambda entry: (-entry[1], entry[2][-1] if entry[2] else 0))
    if len(best) > 1:
        margin = min(margin, best[0][1] - best[1][1])
    path = best[0][2]
    p = probabilities(scores[path[-1] + 1 if path else 0], law)
    token, step = select(p, uniform(seed, position + len(path), TOKEN))
    return path, token, min(margin, step)


def best_beam(
    drafts: Drafts, scores: np.ndarray, law: Law, seed: int, position: int
) -> tuple[list[int], int, float]:
    """ReDrafter's rule: each draft kept with min(1, p / q), the first of the deepest paths; the
    token after it from max(p - q, 0) where the path goes on, else from p. The number of draft i is
    that of node i + 1 of the tree."""
    assert drafts.probs is not None
    margin = 1.0
    best: list[int] = []
    paths: dict[int, list[int]] = {-1: []}
    for child, parent in enumerate(drafts.parents):
        if parent not in paths:
            continue
        before, token = paths[parent], drafts.tokens[child]
        p = probabilities(scores[parent + 1], law)[token]
        q = drafts.probs[child].astype(np.float64)
        wanted = uniform(seed, position + len(before), ACCEPT, child + 1) * q[token] / q.sum()
        margin = min(margin, abs(wanted - p))
        if wanted < p:
            paths[child] = [*before, child]
    for path in (paths[node] for node in sorted(paths)):
        if len(path) > len(best):
            best = path
    end = best[-1] if best else -1
    p = probabilities(scores[end + 1], law)
    further = drafts.children(end)
    if further:
        q = drafts.probs[further[0]].astype(np.float64)
        rest = np.maximum(p - q / q.sum(), 0.0)
        margin = min(margin, rest.sum())
        if rest.sum() > 0:
            p = rest / rest.sum()
    token, step = select(p, uniform(seed, position + len(best), TOKEN))
    return best, token, min(margin, step)
