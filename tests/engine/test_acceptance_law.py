"""Rejection keeps the target's joint law, and the lossy rules have the law they are defined by.

As test_sampling_law.py: a table-driven target behind the real executor, several consecutive tokens,
thousands of requests that differ in their seed only, rejected at p < 1e-6. Here drafts are drawn
from tables of their own, with a law for every context, and accepted by probabilities.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from drawn_drafts import DraftShape, TableDrafter
from table_target import (
    Step,
    TableModel,
    assert_law,
    chi_square,
    joint_law,
    plain_step,
    sample_joint,
)
from test_sampling_law import Process

from reference.sampling_reference import Law, probabilities

VOCAB, TOKENS = 5, 4
PROMPT = [0, 3, 1, 3, 1, 2, 0, 3, 1, 4, 0, 3, 1]

SHAPES = {
    "chain": DraftShape((-1, 0, 1)),
    "one": DraftShape((-1,)),
    "siblings": DraftShape((-1, -1, -1)),
    "tree": DraftShape((-1, -1, 0, 0, 1)),
    "tree with replacement": DraftShape((-1, -1, -1, 0, 0, 1), replacement=True),
    "every token": DraftShape((-1, -1, -1, -1, -1, 0, 0)),
    "reduced chain": DraftShape((-1, 0), ids=(4, 1, 2)),
    "reduced tree": DraftShape((-1, -1, 0, 0), ids=(3, 0, 1)),
    "chosen chain": DraftShape((-1, 0, 1), kind="argmax"),
    "chosen tree": DraftShape((-1, -1, 0, 1, 1), kind="argmax"),
}
ENGINES: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "ngram": {"max_draft_len": 4, "max_matching_ngram_size": 2}},
    "lookahead": {"method": "lookahead", "lookahead": (4, 3, 4)},
}
PROPOSED: dict[str, Any] = {"method": "proposed"}
LAWS = [Law(1.0), Law(0.6, top_p=0.85), Law(1.6, top_k=4, min_p=0.1)]


@functools.cache
def target_table() -> np.ndarray:
    """Scores [before, last, next]."""
    return np.random.default_rng(23).normal(0, 1.2, (VOCAB,) * 3).astype(np.float32)


@functools.cache
def draft_table() -> np.ndarray:
    """Weights q[before, last, next]: near the target's law, and far from it in places."""
    rng = np.random.default_rng(24)
    return np.exp(target_table() + rng.normal(0, 1.0, (VOCAB,) * 3))


def penalties(row: np.ndarray, history: Any) -> np.ndarray:
    """repetition 1.3 over prompt and output, frequency 0.4 over the output."""
    row = row.copy()
    output = list(history[len(PROMPT) :])
    for token in set(history):
        row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
    for token in set(output):
        row[token] -= 0.4 * output.count(token)
    return row


def bans(row: np.ndarray, history: Any) -> np.ndarray:
    """Token 4 never after 3, token 1 with a bias."""
    row = row.copy()
    row[1] += 0.6
    if history[-1] == 3:
        row[4] = -np.inf
    return row


PROCESSORS: dict[str, tuple[Process | None, dict[str, Any]]] = {
    "raw": (None, {}),
    "penalties": (penalties, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}),
    "bans": (bans, {"bad_words": [[3, 4]], "logit_bias": {1: 0.6}}),
}


def proposing(drafter: str, step: Step = plain_step) -> Step:
    """`step` behind the proposals of a drafter of SHAPES; one of ENGINES drafts by itself."""
    if drafter not in SHAPES:
        return step
    mine = TableDrafter(draft_table(), SHAPES[drafter], seed=7)

    def propose(ex: Any, model: TableModel, outputs: dict[int, list[int]]) -> Sequence[Any]:
        ready = [rid for rid, tokens in outputs.items() if tokens]
        mine.propose(ex, ready, np.array([(PROMPT + outputs[rid])[-2:] for rid in ready]))
        return step(ex, model, outputs)

    return propose


def sample(drafter: str, options: dict[str, Any], draws: int) -> np.ndarray:
    """Counts [V ** TOKENS] of what `draws` requests delivered."""
    counts, stats = sample_joint(
        target_table(), PROMPT, TOKENS, draws, options,
        engine=ENGINES.get(drafter, PROPOSED), stream=1, step=proposing(drafter),
    )  # fmt: skip
    assert stats["num_accepted_tokens"] > draws / 100
    return counts


def check_rejection(drafter: str, law: Law, processor: str, draws: int) -> None:
    process, options = PROCESSORS[processor]
    options = {**law.options(), **options, "acceptance": "rejection"}
    wanted = joint_law(target_table(), PROMPT, TOKENS, law, process)
    assert_law(sample(drafter, options, draws), wanted)


CASES = [(drafter, LAWS[0], "raw") for drafter in (*SHAPES, *ENGINES)]
CASES += [(d, law, "raw") for d in ("chain", "tree", "reduced tree") for law in LAWS[1:]]
CASES += [(d, Law(0.8), p) for d in ("chain", "tree") for p in ("penalties", "bans")]


@pytest.mark.parametrize(("drafter", "law", "processor"), CASES, ids=str)
def test_rejection_keeps_the_joint_law(drafter: str, law: Law, processor: str) -> None:
    check_rejection(drafter, law, processor, draws=20_000)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "law", "processor"), CASES, ids=str)
def test_rejection_keeps_the_joint_law_of_a_million(drafter: str, law: Law, processor: str) -> None:
    check_rejection(drafter, law, processor, draws=1_000_000)


def lossy_law(law: Law, length: int, kept: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Any:
    """Exact joint law of chains of `length` drafts from q, where kept(p, q) [V] says which drafts
    are taken; the token after the last one taken is drawn from p."""
    q_table = draft_table() / draft_table().sum(2, keepdims=True)
    joint = np.zeros(VOCAB**TOKENS)
    # Each text's probability, by how many drafts of the step are still to be looked at.
    states: dict[tuple[int, ...], dict[int, float]] = {(): {0: 1.0}}
    for place in range(TOKENS):
        # Drafts of a step that starts after this token; the last place is never a draft's.
        fresh = max(0, min(length, TOKENS - place - 2))
        following: dict[tuple[int, ...], dict[int, float]] = {}
        for output, by_left in states.items():
            before, last = [*PROMPT, *output][-2:]
            p = probabilities(target_table()[before, last], law)
            q = q_table[before, last]
            good = kept(p, q)
            for left, weight in by_left.items():
                for token in range(VOCAB):
                    entry = following.setdefault((*output, token), {})
                    # The step ends with a draw from p.
                    drawn = p[token] * (1.0 if left == 0 else q[~good].sum())
                    entry[fresh] = entry.get(fresh, 0.0) + weight * drawn
                    if left > 0 and good[token]:
                        entry[left - 1] = entry.get(left - 1, 0.0) + weight * q[token]
        states = following
    for cell, output in enumerate(itertools.product(range(VOCAB), repeat=TOKENS)):
        joint[cell] = sum(states[output].values())
    return joint


def typical(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    inside = p[p > 0]
    spread = float(np.exp((inside * np.log(inside)).sum()))
    return (p > 0) & (p >= min(0.15, 0.5 * spread))


def threshold(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p > 0) & (p >= 0.6 * q)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_lossy_rules_have_their_own_law_and_not_the_targets(rule: str, law: Law) -> None:
    options: dict[str, Any] = {**law.options(), "acceptance": rule}
    if rule == "typical":
        options.update(posterior_threshold=0.15, posterior_alpha=0.5)
        wanted = lossy_law(law, 3, typical)
    else:
        options.update(acceptance_threshold=0.6)
        wanted = lossy_law(law, 3, threshold)
    assert abs(wanted.sum() - 1.0) < 1e-9
    counts = sample("chain", options, 20_000)
    assert_law(counts, wanted)
    plain = joint_law(target_table(), PROMPT, TOKENS, law)
    statistic, bound = chi_square(counts, (plain + 1e-9) / (plain + 1e-9).sum())
    assert statistic > bound
