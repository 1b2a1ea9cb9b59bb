"""A model's scores of this repository's documents, for what a width or a K/V type does to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specdec_ext import _core
from specdec_ext.config.engine import pages_for

__all__ = ["CHUNK", "PAGE", "WINDOW", "document_tokens", "log_softmax", "plan", "scores_of"]

PAGE = 32
WINDOW, CHUNK = 2048, 256  # tokens whose scores see each other; tokens of a pass
TEXTS = ("README.md", "docs/usage.md", "docs/exactness.md", "docs/scheduling.md", "docs/overlap.md")


def document_tokens(tokenizer: Any) -> list[int]:
    root = Path(__file__).parents[1]
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in TEXTS)
    return [int(i) for i in tokenizer(text)["input_ids"]]


def plan(tokens: list[int], context: int, **how: Any) -> Any:
    """A step of one request: these tokens behind `context` others."""
    pages = list(range(pages_for(context + len(tokens), PAGE)))
    return _core.make_step_plan([tokens], kv_len=[context], page_table=[pages], **how)


def scores_of(model: Any, tokens: list[int]) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Scores float64 [n, vocabulary] and the n tokens that followed, over whole windows."""
    for start in range(0, len(tokens) - WINDOW + 1, WINDOW):
        window = tokens[start : start + WINDOW]
        for first in range(0, WINDOW, CHUNK):
            part = window[first : first + CHUNK]
            step = plan(part, first, logits_for_all_rows=True, needs_logits=True)
            scores = np.asarray(model.forward(step), dtype=np.float64)
            following = window[first + 1 : first + CHUNK + 1]
            yield scores[: len(following)], following


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Natural logarithms, row by row."""
    shifted: np.ndarray = scores - scores.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
