"""A target whose next-token law is a table over the last two tokens, read through the cache.

Small enough that the joint law of several tokens is known exactly, fast enough for millions of
draws: a forward pass is a handful of NumPy operations over all rows of the step. The token before a
row is its parent in the tree; the one before the root is read from the page where its K/V lies, so
a stale slot or a wrong path changes the law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from reference.sampling_reference import Law, probabilities
from specdec_ext import _core
from specdec_ext.request.resolve import stream_seed

HEAD_DIM = 8


class TableModel:
    """Step model over scores[before, last, next]; pages are float32, one layer, one head."""

    def __init__(self, scores: np.ndarray) -> None:
        self.scores = scores.astype(np.float32)  # [V, V, V]
        self.vocab_size = len(scores)
        self._store: np.ndarray | None = None

    def pages(self, num_pages: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V pages for an executor; K's first element of a slot is the token there."""
        shape = (1, num_pages, 1, page_size, HEAD_DIM)
        k_pages = torch.full(shape, -1.0)
        self._store = k_pages[0, :, 0, :, 0].numpy()
        return k_pages, torch.full(shape, -1.0)

    def forward(self, plan: Any) -> torch.Tensor:
        """Returns float32 scores [L, V]."""
        return torch.from_numpy(self.scores[self.last_two(plan)])

    def last_two(self, plan: Any) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (before, last) of each row that gives scores; the rows enter the pages."""
        assert self._store is not None
        tokens, parents = np.asarray(plan.tokens), np.asarray(plan.parents)
        cu_rows, kv_len = np.asarray(plan.cu_rows), np.asarray(plan.kv_len)
        counts = np.diff(cu_rows)
        request = np.repeat(np.arange(len(counts)), counts)
        row = np.arange(len(tokens)) - cu_rows[request]
        table = np.asarray(plan.page_table)
        size = self._store.shape[1]

        def place(of: np.ndarray, slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return table[of, slot // size], slot % size

        slot = kv_len[request] + row
        self._store[place(request, slot)] = tokens
        rows = np.asarray(plan.logit_rows)
        of, parent = request[rows], parents[rows]
        # A chain's rows name no parents: the slot before is the token before, as it is for a root.
        chain = np.asarray(plan.is_tree)[of] == 0
        before_slot = np.where(
            chain | (parent < 0), kv_len[of] + row[rows] - 1, kv_len[of] + parent
        )
        before = self._store[place(of, before_slot)].astype(np.int64)
        return before, tokens[rows]


# One step of an executor whose running requests have delivered outputs[id]: what it delivers.
Step = Callable[[Any, TableModel, dict[int, list[int]]], Sequence[Any]]


def plain_step(ex: Any, model: TableModel, outputs: dict[int, list[int]]) -> Sequence[Any]:
    plan = ex.plan()
    delivered: Sequence[Any] = ex.commit(plan, model.forward(plan))
    return delivered


def sample_joint(
    scores: np.ndarray,
    prompt: Sequence[int],
    num_tokens: int,
    draws: int,
    options: dict[str, Any],
    *,
    engine: dict[str, Any],
    stream: int,
    step: Step = plain_step,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Counts [V ** num_tokens] of what `draws` requests deliver, and the executor's own.

    options  of every request; they differ in their seeds alone, which `stream` begins
    engine   how the executor drafts
    """
    vocab, batch = len(scores), 500
    model = TableModel(scores)
    k_pages, v_pages = model.pages(num_pages=batch * 9, page_size=4)
    ex = _core.Executor(
        k_pages, v_pages, vocab_size=vocab, max_batch_size=batch, max_seq_len=20,
        max_num_tokens=batch * 24, **engine,
    )  # fmt: skip
    powers = [vocab**i for i in range(num_tokens - 1, -1, -1)]
    counts = np.zeros(vocab**num_tokens, np.int64)
    outputs: dict[int, list[int]] = {}
    submitted = 0
    while submitted < draws or outputs:
        while submitted < draws and len(outputs) < batch:
            seed = stream_seed(stream, submitted)
            outputs[ex.submit(prompt, max_tokens=num_tokens, seed=seed, **options)] = []
            submitted += 1
        for out in step(ex, model, outputs):
            outputs[out.request_id] += out.tokens
            if out.finish_reason is not None:
                tokens = outputs.pop(out.request_id)
                assert len(tokens) == num_tokens, out.error
                counts[sum(t * p for t, p in zip(tokens, powers, strict=True))] += 1
    return counts, ex.stats()


def joint_law(
    scores: np.ndarray,
    prompt: Sequence[int],
    num_tokens: int,
    law: Law,
    process: Callable[[np.ndarray, Sequence[int]], np.ndarray] | None = None,
) -> np.ndarray:
    """Exact probabilities [V ** num_tokens] of the continuations, first token most significant.

    process(row, history) returns the scores after the request's processors.
    """
    vocab = len(scores)
    joint = np.zeros(vocab**num_tokens)
    cache: dict[tuple[int, ...], np.ndarray] = {}

    def next_law(output: tuple[int, ...]) -> np.ndarray:
        if output not in cache:
            history = [*prompt, *output]
            row = scores[history[-2], history[-1]].astype(np.float32)
            cache[output] = probabilities(row if process is None else process(row, history), law)
        return cache[output]

    for cell, output in enumerate(itertools.product(range(vocab), repeat=num_tokens)):
        p = 1.0
        for i, token in enumerate(output):
            p *= next_law(output[:i])[token]
            if p == 0.0:
                break
        joint[cell] = p
    return joint


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """The statistic, cells of expectation below 5 pooled, and its bound for p = 1e-6."""
    expected = law * counts.sum()
    assert counts[law == 0].sum() == 0, "a token of probability 0 was drawn"
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    if expected[-1] < 5:  # too little for a cell of its own
        observed, expected = observed[:-1], expected[:-1]
    degrees = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # Wilson and Hilferty's approximation of the quantile; 4.753 is the normal one of 1e-6.
    spread = 2.0 / (9.0 * degrees)
    return statistic, degrees * (1.0 - spread + 4.753 * spread**0.5) ** 3


def assert_law(counts: np.ndarray, law: np.ndarray) -> None:
    statistic, bound = chi_square(counts, law)
    assert statistic < bound, (statistic, bound)
