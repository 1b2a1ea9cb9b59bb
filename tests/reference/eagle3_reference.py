"""An EAGLE-3 head by the book: NumPy, float64, everything computed anew for every row.

No cache, no pages: what a row sees are the rows in front of it on its path, in a list. Shares no
code with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class Head:
    """A head by its tensors (SpecForge's names) and its config.json.

    embedding  [vocab, H], the head's or the target's
    """

    def __init__(
        self, config: Mapping[str, Any], weights: Mapping[str, Any], embedding: Any = None
    ) -> None:
        self.config = config
        self.weights = {name: np.asarray(w, dtype=np.float64) for name, w in weights.items()}
        own = self.weights.get("embed_tokens.weight")
        self.embedding = np.asarray(embedding, dtype=np.float64) if own is None else own
        offsets = np.asarray(weights["d2t"])
        self.token_of = np.arange(len(offsets)) + offsets

    def features(self, taps: Any) -> Array:
        """[n, H] of the target's three states [n, 3 * H of the target]."""
        fused: Array = np.asarray(taps, dtype=np.float64) @ self.weights["fc.weight"].T
        return fused

    def follow(
        self, tokens: Sequence[int], features: Array, draft: Sequence[int]
    ) -> tuple[Array, Array]:
        """Probabilities [draft vocabulary] behind the last of `draft`, and the result there.

        tokens, features  of the text's rows: token i + 1 beside the feature of position i
        draft             drafts behind them, each beside the result of the row in front of it
        """
        known = list(zip(tokens, features, strict=True))
        result = self._layer(known)
        for token in draft:
            known.append((token, result))
            result = self._layer(known)
        scores = self.weights["lm_head.weight"] @ self._norm(result, "norm.weight")
        weights = np.exp(scores - scores.max())
        return weights / weights.sum(), result

    def _norm(self, x: Array, name: str) -> Array:
        eps = self.config.get("rms_norm_eps", 1e-6)
        normed: Array = x / np.sqrt((x * x).mean() + eps) * self.weights[name]
        return normed

    def _row(self, token: int, feature: Array) -> Array:
        embedded = self._norm(self.embedding[token], "midlayer.input_layernorm.weight")
        return np.concatenate([embedded, self._norm(feature, "midlayer.hidden_norm.weight")])

    def _turn(self, vector: Array, position: int) -> Array:
        """Rotary position, the halves of a head against each other."""
        half = len(vector) // 2
        base = float(self.config.get("rope_theta", 10000.0))
        angles = position / base ** (np.arange(half) / half)
        first, second = vector[:half], vector[half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin])

    def _project(self, name: str, x: Array) -> Array:
        whole = f"midlayer.self_attn.{name}_proj"
        projected: Array = self.weights[whole + ".weight"] @ x
        bias = self.weights.get(whole + ".bias")
        return projected if bias is None else projected + bias

    def _layer(self, rows: Sequence[tuple[int, Array]]) -> Array:
        """The result of the last row."""
        c = self.config
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        size = c.get("head_dim") or c["hidden_size"] // heads
        inputs = [self._row(token, feature) for token, feature in rows]
        keys = [self._project("k", x).reshape(kv_heads, size) for x in inputs]
        values = [self._project("v", x).reshape(kv_heads, size) for x in inputs]
        queries = self._project("q", inputs[-1]).reshape(heads, size)
        out = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            query = self._turn(queries[head], len(rows) - 1)
            scores = np.array(
                [query @ self._turn(key[group], i) / np.sqrt(size) for i, key in enumerate(keys)]
            )
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out.append(sum(w * v[group] for w, v in zip(weights, values, strict=True)))
        feature = rows[-1][1]
        if c.get("norm_before_residual"):
            feature = self._norm(feature, "midlayer.hidden_norm.weight")
        result = feature + self._project("o", np.concatenate(out))
        x = self._norm(result, "midlayer.post_attention_layernorm.weight")
        gate = self.weights["midlayer.mlp.gate_proj.weight"] @ x
        up = self.weights["midlayer.mlp.up_proj.weight"] @ x
        down = self.weights["midlayer.mlp.down_proj.weight"]
        mixed: Array = result + down @ (gate / (1.0 + np.exp(-gate)) * up)
        return mixed


def draft_tree(
    head: Head, text: Sequence[int], taps: Any, *, top_k: int, depth: int, nodes: int
) -> list[tuple[tuple[int, ...], float]]:
    """(path of tokens, product of probabilities) of the nodes drafted behind `text`, best first.

    taps  [len(text) - 1, ...] of all but the last token
    """
    features = head.features(taps)
    kept: list[tuple[tuple[int, ...], float]] = []
    opened: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(depth):
        level = []
        for path, worth in opened:
            probs, _ = head.follow(text[1:], features, path)
            best = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[:top_k]
            level += [((*path, int(head.token_of[i])), worth * float(probs[i])) for i in best]
        kept = sorted(kept + level, key=lambda node: -node[1])[:nodes]
        opened = sorted((n for n in level if n in kept), key=lambda node: -node[1])[:top_k]
    return kept
