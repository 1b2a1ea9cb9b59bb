"""Scores with the best token of each row: the same choices, without reading them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from driver import best_of

from specdec_ext import _core

VOCAB = 70


def executor(**options: Any) -> Any:
    pages = torch.zeros(1, 16, 1, 8, 8)
    return _core.Executor(
        pages, pages.clone(), vocab_size=VOCAB, max_batch_size=1, max_seq_len=100,
        max_num_tokens=64, **options,
    )  # fmt: skip


def scores_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Few different numbers, so that several are the best; rows of -inf, with NaN or inf."""
    scores = rng.integers(0, 4, (rows, VOCAB)).astype(np.float32)
    kind = rng.integers(0, 8)
    if kind == 0:
        scores[rng.integers(rows)] = -np.inf
    elif kind == 1:
        scores[rng.integers(rows), rng.integers(VOCAB)] = np.nan
    elif kind == 2:
        scores[rng.integers(rows), rng.integers(VOCAB)] = np.inf
    return scores


def masks_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    words = -(-VOCAB // 32)
    density = rng.choice([0.02, 0.5, 1.0])
    bits = rng.random((rows, words * 32)) < density
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"grammar": True},
    {"grammar": True, "repetition_penalty": 1.3},
    {"logit_bias": {3: 2.0}},
    {"temperature": 0.8, "seed": 5},
    {"grammar": True, "temperature": 0.8, "seed": 5},
    {"logprobs": 2},
    {"min_tokens": 3, "eos_token_ids": [1, 2]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rates", [[], [0.8, 0.4]], ids=["", "synthetic"])
def test_choices_do_not_depend_on_it(options: dict[str, Any], rates: list[float]) -> None:
    if rates and options.get("grammar"):
        pytest.skip("synthetic acceptance excludes a grammar")
    decided = 0
    for seed in range(80):
        rng = np.random.default_rng(seed)
        made = {"method": "suffix", "adaptive": False, "synthetic_acceptance_rates": rates}
        both = [executor(**made) for _ in range(2)]
        prompt = [int(t) for t in rng.integers(3, 9, 12)]
        ids = [ex.submit(prompt, max_tokens=20, **options) for ex in both]
        for _ in range(30):
            plans = [ex.plan() for ex in both]
            if plans[0] is None:
                break
            assert plans[0].tokens.tolist() == plans[1].tokens.tolist()
            scores = scores_of(rng, plans[0].num_logit_rows)
            masks = masks_of(rng, plans[0].num_logit_rows) if options.get("grammar") else None
            outputs = [
                ex.commit(
                    plan, scores if plan.needs_logits else best_of(scores),
                    masks={} if masks is None else {rid: masks},
                    best=best_of(scores) if known and plan.needs_logits else None,
                )
                for ex, plan, rid, known in zip(both, plans, ids, (True, False), strict=True)
            ]  # fmt: skip
            first, second = ([(o.tokens, o.finish_reason, o.error) for o in out] for out in outputs)
            assert first == second
            decided += sum(len(tokens) for tokens, _, _ in first)
    assert decided > 60


def test_it_is_what_greedy_requests_take() -> None:
    """Ids that are not the scores' own show who is asked."""
    ex = executor()
    rid = ex.submit([5, 6], max_tokens=9, logprobs=1)
    plan, scores = ex.plan(), np.zeros((1, VOCAB), dtype=np.float32)
    [out] = ex.commit(plan, scores, best=np.array([44], dtype=np.int32))
    assert out.tokens == [44]
    plan = ex.plan()  # scores that the caller changed have other ones
    changed = scores.copy()
    changed[0, 7] = 1.0
    [out] = ex.commit(plan, changed, raw=scores, best=np.array([44], dtype=np.int32))
    assert out.tokens == [7] and out.request_id == rid


@pytest.mark.parametrize(
    ("best", "match"),
    [
        (np.zeros(2, dtype=np.int32), "best: expected a contiguous int32 CPU tensor"),
        (np.zeros((1, 1), dtype=np.int32), "best: expected a contiguous int32 CPU tensor"),
        (np.zeros(1, dtype=np.int64), "best: expected a contiguous int32 CPU tensor"),
        (np.array([VOCAB], dtype=np.int32), "token ids are 0..69"),
    ],
    ids=["rows", "axes", "dtype", "id"],
)
def test_refused(best: np.ndarray, match: str) -> None:
    ex = executor()
    ex.submit([5, 6], max_tokens=9, logprobs=1)
    plan, scores = ex.plan(), np.zeros((1, VOCAB), dtype=np.float32)
    with pytest.raises(ValueError, match=match):
        ex.commit(plan, scores, best=best)
    [out] = ex.commit(plan, scores)  # nothing is lost
    assert out.tokens == [0]


def test_beside_scores_alone() -> None:
    ex = executor()
    ex.submit([5, 6], max_tokens=9)
    ids = np.zeros(1, dtype=np.int32)
    with pytest.raises(ValueError, match="beside scores"):
        ex.commit(ex.plan(), ids, best=ids)
