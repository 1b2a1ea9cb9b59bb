"""The joint law of several sampled tokens is the target's, for every drafter: chi-square tests.

Sampling by exact match is plain sampling token for token (test_sampling.py); this holds the whole
path, executor and drafters included, against the law itself: a table-driven target behind the real
executor, 216 joint cells of three tokens, thousands of requests that differ in their seed only.
A configuration is rejected at p < 1e-6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from table_target import (
    TableModel,
    assert_law,
    chi_square,
    joint_law,
    plain_step,
    sample_joint,
)

from reference.sampling_reference import Law

VOCAB, TOKENS = 6, 3
PROMPT = [0, 3, 1, 3, 1, 2, 0, 3, 1, 4, 5, 0, 3, 1]

Process = Callable[[np.ndarray, Sequence[int]], np.ndarray]

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "ngram": {"max_draft_len": 4, "max_matching_ngram_size": 2}},
    "ngram newest": {
        "method": "ngram",
        "ngram": {
            "max_draft_len": 6, "max_matching_ngram_size": 3, "is_keep_all": False,
            "is_use_oldest": False,
        },
    },
    "lookahead": {"method": "lookahead", "lookahead": (4, 3, 4)},
    "lookahead deep": {"method": "lookahead", "lookahead": (5, 5, 5)},
    "tree": {"method": "proposed"},
    "wide tree": {"method": "proposed"},
}  # fmt: skip
# Trees handed in with propose(): tokens and parents, -1 for the golden token.
TREES = {
    "tree": ([3, 1, 2, 1, 4], [-1, -1, 0, 1, 1]),
    "wide tree": ([0, 1, 2, 3, 4, 5, 0, 1, 2], [-1, -1, -1, -1, -1, -1, 1, 1, 3]),
}
LAWS = [
    Law(1.0),
    Law(0.5),
    Law(2.0),
    Law(0.7, top_k=3),
    Law(1.0, top_p=0.8),
    Law(1.5, min_p=0.15),
    Law(0.9, top_k=5, top_p=0.9, min_p=0.05),
]


def penalties(row: np.ndarray, history: Sequence[int]) -> np.ndarray:
    """repetition 1.2 over prompt and output, presence 0.3 and frequency 0.2 over the output."""
    row = row.copy()
    output = list(history[len(PROMPT) :])
    for token in set(history):
        row[token] = row[token] / 1.2 if row[token] > 0 else row[token] * 1.2
    for token in set(output):
        row[token] -= 0.3 + 0.2 * output.count(token)
    return row


def bans(row: np.ndarray, history: Sequence[int]) -> np.ndarray:
    """Token 4 never after 3, token 5 with a bias."""
    row = row.copy()
    row[5] += 0.7
    if history[-1] == 3:
        row[4] = -np.inf
    return row


PROCESSORS: dict[str, tuple[Process | None, dict[str, Any]]] = {
    "raw": (None, {}),
    "penalties": (
        penalties,
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    ),
    "bans": (bans, {"bad_words": [[3, 4]], "logit_bias": {5: 0.7}}),
}


@functools.cache
def table() -> np.ndarray:
    """Scores [before, last, next]: every context has a law of its own."""
    return np.random.default_rng(17).normal(0, 1.2, (VOCAB, VOCAB, VOCAB)).astype(np.float32)


def sample(drafter: str, options: dict[str, Any], draws: int) -> np.ndarray:
    """Counts [V ** TOKENS] of what `draws` requests delivered."""

    def step(ex: Any, model: TableModel, outputs: dict[int, list[int]]) -> Sequence[Any]:
        if drafter in TREES:
            for rid, tokens in outputs.items():
                if tokens:
                    ex.propose(rid, *TREES[drafter])
        return plain_step(ex, model, outputs)

    counts, stats = sample_joint(
        table(), PROMPT, TOKENS, draws, options, engine=DRAFTERS[drafter], stream=0, step=step
    )
    accepted = stats["num_accepted_tokens"]
    assert (accepted > draws / 100) == (drafter != "none"), accepted
    return counts


def check(drafter: str, law: Law, processor: str, draws: int) -> None:
    process, options = PROCESSORS[processor]
    counts = sample(drafter, {**law.options(), **options}, draws)
    assert_law(counts, joint_law(table(), PROMPT, TOKENS, law, process))


RAW = [(d, law, "raw") for d in DRAFTERS for law in LAWS]
PROCESSED = [(d, Law(0.8), p) for d in DRAFTERS for p in ("penalties", "bans")]
CASES = RAW + PROCESSED


# A draft is proposed before the law is looked at: every other pair, as on a chessboard, so that
# each drafter meets three laws or four, and each law as many drafters. A million draws: all pairs.
@pytest.mark.parametrize(("drafter", "law", "processor"), RAW[::2] + PROCESSED, ids=str)
def test_joint_law(drafter: str, law: Law, processor: str) -> None:
    check(drafter, law, processor, draws=20_000)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "law", "processor"), CASES, ids=str)
def test_joint_law_of_a_million(drafter: str, law: Law, processor: str) -> None:
    check(drafter, law, processor, draws=1_000_000)


def wrong_laws() -> dict[str, np.ndarray]:
    """What samplers with known faults would draw from."""
    right = table()
    law = Law(0.8)
    shifted = np.roll(right, 1, axis=1)
    stale = np.broadcast_to(right[3, 1], right.shape)
    greedy_last = joint_law(right, PROMPT, TOKENS, law).reshape(-1, VOCAB)
    best = np.zeros_like(greedy_last)
    contexts = np.arange(len(greedy_last))
    winners = right[contexts // VOCAB % VOCAB, contexts % VOCAB].argmax(1)
    best[contexts, winners] = greedy_last.sum(1)
    mixed = 0.7 * joint_law(right, PROMPT, TOKENS, law) + 0.3 * best.ravel()
    return {
        "temperature 10 % off": joint_law(right, PROMPT, TOKENS, Law(0.88)),
        "rows shifted": joint_law(shifted, PROMPT, TOKENS, law),
        "stale context": joint_law(np.ascontiguousarray(stale), PROMPT, TOKENS, law),
        "last token sometimes the best": mixed,
        "filter forgotten": joint_law(right, PROMPT, TOKENS, Law(0.8, min_p=0.1)),
        "penalties": joint_law(right, PROMPT, TOKENS, law, penalties),
    }


def test_the_test_rejects_wrong_laws() -> None:
    """20,000 draws tell the right law from every wrong one."""
    counts = sample("ngram", Law(0.8).options(), 20_000)
    assert_law(counts, joint_law(table(), PROMPT, TOKENS, Law(0.8)))
    for name, wrong in wrong_laws().items():
        # A wrong law may call impossible what was drawn: that is a rejection, too.
        padded = (wrong + 1e-9) / (wrong + 1e-9).sum()
        statistic, bound = chi_square(counts, padded)
        assert statistic > bound, name
