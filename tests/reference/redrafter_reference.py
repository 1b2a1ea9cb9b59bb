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


def log_probabilities(scores: Sequence[float], keep: int = 50) -> list[tuple[int, float]]:
    """(index, log-probability) of the `keep` largest scores, largest first, lower index first.

    Log-softmax over these alone: what is not kept has no probability.
    """
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:keep]
    top = scores[order[0]]
    total = math.log(sum(math.exp(scores[i] - top) for i in order))
    return [(i, scores[i] - top - total) for i in order]


def beam_search(
    score: Callable[[tuple[int, ...]], Sequence[float]], num_beams: int, length: int
) -> list[list[int]]:
    """Beams of `length` drafts, best first.

    score(path) are the scores of the tokens after the drafts `path`. Among equal totals the beam
    that stood first comes first, then its better token.
    """
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        grown = [
            (total + logp, (*path, token))
            for total, path in beams
            for token, logp in log_probabilities(score(path))
        ]
        grown.sort(key=lambda entry: -entry[0])  # stable
        beams = grown[:num_beams]
    return [list(path) for _, path in beams]


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
