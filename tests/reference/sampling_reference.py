"""Sampling by the book: float64, whole sorted rows, its own Philox. Shares no code with cpp/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_M = 0xFFFFFFFF
PURPOSE_TOKEN = 3


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 as printed in Salmon et al., SC 2011."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & _M, (p0 >> 32) ^ c[3] ^ k1, p0 & _M]
        k0, k1 = (k0 + 0x9E3779B9) & _M, (k1 + 0xBB67AE85) & _M
    return c


def token_uniform(seed: int, position: int) -> float:
    counter = (position & _M, position >> 32, PURPOSE_TOKEN, 0)
    words = philox4x32(counter, (seed & _M, seed >> 32))
    return ((words[0] << 21) | (words[1] >> 11)) / 2.0**53


@dataclass(frozen=True)
class Law:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def options(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }


def probabilities(scores: np.ndarray, law: Law) -> np.ndarray:
    """The law of the next token, [V] float64; cuts in the order min_p, top_k, top_p."""
    x = scores.astype(np.float64)
    p = np.exp((x - x.max()) / np.float64(np.float32(law.temperature)))
    p[p < law.min_p] = 0.0
    if law.top_k:
        kept = np.sort(x[p > 0])[::-1]
        p[x < kept[min(law.top_k, len(kept)) - 1]] = 0.0
    p /= p.sum()
    if law.top_p < 1.0:
        order = np.lexsort((np.arange(len(x)), -x))
        mass = np.cumsum(p[order])
        count = int(np.searchsorted(mass, np.float64(np.float32(law.top_p)) * p.sum())) + 1
        p[order[count:]] = 0.0
        p /= p.sum()
    return p


def draw(scores: np.ndarray, law: Law, u: float) -> int:
    """The first token, by id, at which the distribution function exceeds u."""
    p = probabilities(scores, law)
    return int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"))


def margin(scores: np.ndarray, law: Law, u: float) -> float:
    """How far u is from the nearest step of the distribution function: what rounding may not do."""
    return float(np.abs(np.cumsum(probabilities(scores, law)) - u).min())
