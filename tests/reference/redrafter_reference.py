"""ReDrafter in plain Python and double precision: network, beam search, prefix tree.

Lists and math alone; shares nothing with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Vector = list[float]


def _silu(value: float) -> float:
    return value / (1.0 + math.exp(-value))


def _linear(weight: Sequence[Vector], x: Vector, bias: Vector | None = None) -> Vector:
    bias = bias if bias is not None else [0.0] * len(weight)
    return [sum(w * v for w, v in zip(row, x, strict=True)) + b
            for row, b in zip(weight, bias, strict=True)]  # fmt: skip


class Network:
    """The recurrent drafter by its weights (nested lists, canonical names) and its config.json."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        self.config, self.weights = config, weights

    def next_state(self, state: Vector, embedding: Vector) -> Vector:
        if not self.config["rnn"]:
            return [s + e for s, e in zip(state, embedding, strict=True)]
        w = self.weights
        from_token = _linear(w["rnn_w.weight"], embedding)
        from_state = _linear(w["rnn_u.weight"], state, w["rnn_u.bias"])
        return [_silu(a + b) for a, b in zip(from_token, from_state, strict=True)]

    def features(self, context: Vector, state: Vector) -> Vector:
        w, x = self.weights, context + state
        if self.config["exit_dim"] != 2 * self.config["hidden_size"]:
            x = _linear(w["input_proj.weight"], x, w["input_proj.bias"])
        for i in range(self.config["num_draft_layers"]):
            name = f"lm_head.{i}.linear."
            y = _linear(w[name + "weight"], x, w[name + "bias"])
            x = [a + _silu(b) for a, b in zip(x, y, strict=True)]
        return x

    def scores(self, context: Vector, state: Vector, head: Sequence[Vector]) -> Vector:
        return _linear(head, self.features(context, state))


def log_probabilities(
    scores: Sequence[float], temperature: float = 1.0, keep: int = 50
) -> list[tuple[int, float]]:
    """(index, log-probability) of the `keep` largest scores, largest first, lower index first.

    Log-softmax over these alone: what is not kept has no probability. A row with NaN or +infinity
    has no candidates, a score of -infinity is none.
    """
    if any(math.isnan(s) or s == math.inf for s in scores):
        return []
    finite = [i for i in range(len(scores)) if scores[i] > -math.inf]
    order = sorted(finite, key=lambda i: (-scores[i], i))[:keep]
    if not order:
        return []
    below = [(scores[i] - scores[order[0]]) / temperature for i in order]
    total = math.log(sum(math.exp(z) for z in below))
    return [(i, z - total) for i, z in zip(order, below, strict=True)]


Beam = tuple[tuple[int, ...], list[float]]


def beam_search(
    score: Callable[[tuple[int, ...]], Sequence[float]],
    num_beams: int,
    length: int,
    temperature: float = 1.0,
) -> list[Beam]:
    """(drafts, log-probability of each prefix) of the beams, best first.

    score(path) are the scores of the tokens after the drafts `path`. Among equal totals the beam
    that stood first comes first, then its better token.
    """
    beams: list[Beam] = [((), [])]
    for _ in range(length):
        grown = [
            ((*path, token), [*sums, (sums[-1] if sums else 0.0) + logp])
            for path, sums in beams
            for token, logp in log_probabilities(score(path), temperature)
        ]
        if not grown:
            break
        grown.sort(key=lambda beam: -beam[1][-1])  # stable
        beams = grown[:num_beams]
    return beams if beams[0][0] else []


def prefix_tree(beams: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """(tokens, parents) of beams with common prefixes merged, beam after beam; -1: no parent."""
    node_of: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    for beam in beams:
        for depth in range(len(beam)):
            path = tuple(beam[: depth + 1])
            if path not in node_of:
                node_of[path] = len(tokens)
                tokens.append(beam[depth])
                parents.append(node_of[path[:-1]])
    return tokens, parents


def likeliest_tree(beams: Sequence[Beam], limit: int) -> tuple[list[int], list[int]]:
    """prefix_tree of the `limit` likeliest prefixes; the one that comes first on ties."""
    prefixes: dict[tuple[int, ...], float] = {}
    for path, sums in beams:
        for depth, total in enumerate(sums):
            prefixes.setdefault(path[: depth + 1], total)
    kept = set(sorted(prefixes, key=lambda path: -prefixes[path])[:limit])
    return prefix_tree([path for path in prefixes if path in kept])
