"""Samples of a grammar have the masked target's own law, however drafts are made, cut and accepted.

As test_acceptance_law.py. The grammar here says which token may follow which: masks and cuts are
all that an executor knows of any grammar.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from driver import best_of
from table_target import TableModel, assert_law, joint_law, sample_joint
from test_acceptance_law import (
    ENGINES,
    PROMPT,
    PROPOSED,
    SHAPES,
    TOKENS,
    VOCAB,
    proposing,
    target_table,
)

from reference.sampling_reference import Law
from specdec_ext import _core


@functools.cache
def allowed() -> np.ndarray:
    """[last, next]: two to four of the five tokens, and behind token 2 one alone."""
    table = np.random.default_rng(31).random((VOCAB, VOCAB)) < 0.6
    table[np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = True
    table[2] = np.arange(VOCAB) == 3
    return table


def masked(row: np.ndarray, history: Any) -> np.ndarray:
    return np.where(allowed()[history[-1]], row, -np.inf).astype(np.float32)


def walk(tree: Any) -> tuple[list[int], np.ndarray]:
    """(kept, masks of what is left), by the definition."""
    kept = [True] * len(tree.tokens)
    for node, parent in enumerate(tree.parents):
        if node > 0:
            fits = allowed()[tree.tokens[parent], tree.tokens[node]]
            kept[node] = node < tree.fixed or bool(kept[parent] and fits)
    bits = allowed()[tree.tokens] @ (1 << np.arange(VOCAB))
    return [int(k) for k in kept], bits[kept].astype(np.int32)[:, None]


def masked_step(ex: Any, model: TableModel, outputs: dict[int, list[int]]) -> Sequence[Any]:
    for rid, tokens in outputs.items():
        if tokens and tokens[-1] == 2:
            ex.force(rid, [3])
    assert ex.stage() is not None
    masks = {}
    for tree in ex.draft():
        kept, masks[tree.request_id] = walk(tree)
        if not all(kept):
            ex.cut(tree.request_id, kept)
    plan = ex.build()
    scores = model.forward(plan)
    best = best_of(scores) if plan.step % 2 else None
    delivered: Sequence[Any] = ex.commit(plan, scores, masks=masks, best=best)
    return delivered


def check(drafter: str, law: Law, acceptance: str, draws: int) -> None:
    options = {**law.options(), "acceptance": acceptance, "grammar": True}
    counts, stats = sample_joint(
        target_table(), PROMPT, TOKENS, draws, options,
        engine=ENGINES.get(drafter, PROPOSED), stream=1, step=proposing(drafter, masked_step),
    )  # fmt: skip
    assert_law(counts, joint_law(target_table(), PROMPT, TOKENS, law, masked))
    assert stats["grammar_cut"] > draws / 100 and stats["num_accepted_tokens"] > draws / 100


LAWS = [Law(1.0), Law(0.7, top_k=3), Law(1.5, top_p=0.9)]
CASES = [(drafter, LAWS[0], "rejection", 20_000) for drafter in (*SHAPES, *ENGINES)]
CASES += [("tree", law, "rejection", 20_000) for law in LAWS[1:]]
CASES += [(drafter, LAWS[0], "exact_match", 5_000) for drafter in ("tree", *ENGINES)]


@pytest.mark.parametrize(("drafter", "law", "acceptance", "draws"), CASES, ids=str)
def test_masked_samples_have_the_masked_law(
    drafter: str, law: Law, acceptance: str, draws: int
) -> None:
    check(drafter, law, acceptance, draws)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "law", "acceptance", "draws"), CASES, ids=str)
def test_masked_samples_have_the_masked_law_in_a_million(
    drafter: str, law: Law, acceptance: str, draws: int
) -> None:
    check(drafter, law, acceptance, 1_000_000)


def test_masks_are_asked_for() -> None:
    """A request with a grammar is never decided without its masks."""
    model = TableModel(target_table())
    k_pages, v_pages = model.pages(num_pages=9, page_size=4)
    ex = _core.Executor(
        k_pages, v_pages, vocab_size=VOCAB, max_batch_size=1, max_seq_len=20, max_num_tokens=24
    )
    rid = ex.submit(PROMPT, max_tokens=2, grammar=True)
    plan = ex.plan()
    scores = model.forward(plan)
    one = np.full((1, 1), -1, np.int32)
    for masks, match in (
        ({}, "has a grammar: give the masks of its tree"),
        ({rid: np.full((2, 1), -1, np.int32)}, "have 2 rows, its tree has 1 nodes"),
        ({rid: np.full((1, 0), -1, np.int32)}, "have 0 words, 1 hold the vocabulary"),
    ):
        with pytest.raises(ValueError, match=match):
            ex.commit(plan, scores, masks=masks)
    [out] = ex.commit(plan, scores, masks={rid: one << 3})
    assert out.tokens[0] >= 3
    plan = ex.plan()
    [out] = ex.commit(plan, model.forward(plan), masks={rid: one * 0})
    assert out.finish_reason == "error" and "no token is allowed here" in out.error
