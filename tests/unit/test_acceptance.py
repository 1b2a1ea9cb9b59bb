"""Acceptance by probabilities against the reference, decision by decision, and its refusals.

Both sides see the same scores, drafts and random numbers, so tokens and paths compare exactly. A
case in which some decision falls within float32 rounding of its bound (margin below 1e-5) may
differ; such cases are counted and must be rare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reference.acceptance_reference import (
    ACCEPT,
    DRAFT,
    TOKEN,
    Drafts,
    deepest,
    expand,
    rejection,
    uniform,
)
from reference.sampling_reference import Law
from specdec_ext import _core, _core_testing

LAWS = [
    Law(1.0),
    Law(0.4),
    Law(2.0),
    Law(0.8, top_k=5),
    Law(1.0, top_p=0.8),
    Law(1.2, min_p=0.1),
    Law(0.9, top_k=12, top_p=0.9, min_p=0.02),
]
SEEDS = 60


def draft_rows(rng: np.random.Generator, scores: np.ndarray, spread: float) -> np.ndarray:
    """Distributions that resemble softmax(scores), float32 [n, V]."""
    noisy = scores + rng.normal(0, spread, scores.shape)
    weights = np.exp(noisy - noisy.max(1, keepdims=True))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def draw_tree(
    rng: np.random.Generator,
    shape: list[int],
    vocab: int,
    *,
    replacement: bool = False,
    ids: np.ndarray | None = None,
) -> tuple[Drafts, np.ndarray, np.ndarray]:
    """Drafts drawn along a tree: (drafts over columns, scores [n + 1, V], probs [n, columns])."""
    n = len(shape)
    scores = rng.normal(0, 2, (n + 1, vocab)).astype(np.float32)
    columns = np.arange(vocab) if ids is None else ids
    rows = draft_rows(rng, scores[:, columns], 0.7)
    tokens: list[int] = []
    probs = np.empty((n, len(columns)), np.float32)
    for i, parent in enumerate(shape):
        probs[i] = rows[parent + 1]
        q = probs[i].astype(np.float64)
        if not replacement:
            earlier = [tokens[j] for j in range(i) if shape[j] == parent]
            q[np.isin(columns, earlier)] = 0.0
        tokens.append(int(columns[rng.choice(len(columns), p=q / q.sum())]))
    return Drafts(tokens, shape, probs, replacement), scores, probs


SHAPES = {
    "one": [-1],
    "chain": [-1, 0, 1, 2, 3],
    "siblings": [-1, -1, -1, -1],
    "tree": [-1, -1, 0, 0, 1, 2, 2, 4, -1, 8],
}


class Count:
    """Cases that were compared, and those in which a near decision fell differently."""

    def __init__(self) -> None:
        self.cases = self.near = self.accepted = 0

    def compare(self, got: Any, want: Any) -> None:
        path, token, margin = want
        self.cases += 1
        self.accepted += len(path)
        if got != (path, token):
            assert margin < 1e-5, (got, want)
            self.near += 1


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("replacement", [False, True])
def test_rejection_equals_the_reference(law: Law, shape: list[int], replacement: bool) -> None:
    rng = np.random.default_rng([LAWS.index(law), len(shape), replacement])
    count = Count()
    for vocab in (4, 30, 200):
        for seed in range(SEEDS // 3):
            drafts, scores, probs = draw_tree(rng, shape, vocab, replacement=replacement)
            got = _core_testing.accept_drafts(
                drafts.tokens, shape, scores, seed=seed, position=100 + seed,
                acceptance="rejection", probs=probs, replacement=replacement, **law.options(),
            )  # fmt: skip
            count.compare(got, rejection(drafts, scores, law, seed, 100 + seed))
    assert count.accepted > 0
    assert count.near <= 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_reduced_vocabulary_is_zero_elsewhere(shape: list[int], dtype: torch.dtype) -> None:
    rng = np.random.default_rng(len(shape))
    count = Count()
    for seed in range(SEEDS):
        vocab = 50
        ids = rng.permutation(vocab)[:12]
        drafts, scores, probs = draw_tree(rng, shape, vocab, ids=ids)
        whole = Drafts(drafts.tokens, shape, expand(probs, ids, vocab))
        got = _core_testing.accept_drafts(
            drafts.tokens, shape, scores, seed=seed, position=7, acceptance="rejection",
            temperature=1.0, probs=probs, vocab_ids=torch.from_numpy(ids.copy()).to(dtype),
        )  # fmt: skip
        count.compare(got, rejection(whole, scores, Law(1.0), seed, 7))
    assert count.near <= 1


def test_rows_that_already_lack_earlier_siblings_are_the_same_thing() -> None:
    rng = np.random.default_rng(3)
    for seed in range(SEEDS):
        drafts, scores, probs = draw_tree(rng, [-1, -1, -1], 12)
        conditional = probs.copy()
        for i in range(3):
            conditional[i, drafts.tokens[:i]] = 0.0
            conditional[i] /= conditional[i].sum()
        answers = [
            _core_testing.accept_drafts(
                drafts.tokens, [-1] * 3, scores, seed=seed, position=3, acceptance="rejection",
                temperature=1.0, probs=rows, replacement=replacement,
            )
            for rows, replacement in ((probs, False), (conditional, False), (conditional, True))
        ]  # fmt: skip
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rule", ["typical", "threshold", "threshold of one-hot drafts"])
def test_lossy_rules_equal_the_reference(law: Law, shape: list[int], rule: str) -> None:
    rng = np.random.default_rng([LAWS.index(law), len(shape), len(rule)])
    count = Count()
    for seed in range(SEEDS):
        drafts, scores, probs = draw_tree(rng, shape, 30)
        options: dict[str, Any] = {"acceptance": rule.split()[0], "probs": probs}
        if rule == "typical":
            options.update(posterior_threshold=0.2, posterior_alpha=0.6)
            numbers = (float(np.float32(0.2)), float(np.float32(0.6)))
            want = deepest(drafts, scores, law, seed, 9, typical=numbers)
        else:
            if "one-hot" in rule:
                drafts.probs = options["probs"] = None
            options["acceptance_threshold"] = 0.25
            want = deepest(drafts, scores, law, seed, 9, threshold=0.25)
        got = _core_testing.accept_drafts(
            drafts.tokens, shape, scores, seed=seed, position=9, **options, **law.options()
        )
        count.compare(got, want)
    assert count.accepted > 0
    assert count.near <= 1


def test_a_draft_as_likely_as_it_claims_is_always_kept() -> None:
    """q = p: nothing is rejected, and what rounding leaves of the residual is never drawn from."""
    rng = np.random.default_rng(1)
    scores = rng.normal(0, 3, (6, 4000)).astype(np.float32)
    weights = torch.softmax(torch.from_numpy(scores[:5]), 1)
    for seed in range(200):
        tokens = [int(torch.multinomial(row, 1)) for row in weights]
        path, _ = _core_testing.accept_drafts(
            tokens, [-1, 0, 1, 2, 3], scores, seed=seed, position=1, acceptance="rejection",
            temperature=1.0, probs=weights,
        )  # fmt: skip
        assert path == [0, 1, 2, 3, 4]


def test_what_the_target_forbids_is_never_delivered() -> None:
    scores = np.zeros((2, 5), np.float32)
    scores[0, [1, 3]] = -np.inf
    probs = np.full((1, 5), 0.2, np.float32)
    for seed in range(300):
        for draft in range(5):
            path, token = _core_testing.accept_drafts(
                [draft], [-1], scores, seed=seed, position=0, acceptance="rejection",
                temperature=1.0, probs=probs,
            )  # fmt: skip
            assert (draft if path else token) not in (1, 3)


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_rows_that_cannot_be_drawn_from(acceptance: str) -> None:
    """A bad row is reported where it would decide; a bad row off the path does no harm."""
    for bad, code in ((np.nan, -1), (-np.inf, -2)):
        scores = np.zeros((4, 6), np.float32)
        scores[:, 2] = 20.0
        options: dict[str, Any] = {
            "seed": 1, "position": 0, "acceptance": acceptance, "temperature": 1.0,
            "probs": np.full((3, 6), 1 / 6, np.float32),
        }  # fmt: skip
        broken = scores.copy()
        broken[0] = bad
        assert _core_testing.accept_drafts([2, 2, 5], [-1, 0, -1], broken, **options) == ([], code)
        broken = scores.copy()
        broken[1] = bad
        assert _core_testing.accept_drafts([2, 2, 5], [-1, 0, -1], broken, **options) == ([0], code)
        broken = scores.copy()
        broken[3] = bad
        assert _core_testing.accept_drafts([2, 2, 5], [-1, 0, -1], broken, **options) == ([0, 1], 2)


def test_numbers_are_keyed_by_seed_position_purpose_and_sibling() -> None:
    purposes = {"token": TOKEN, "accept": ACCEPT, "draft": DRAFT}
    seen = set()
    for seed in (0, 1, 2**64 - 1):
        for position in (0, 5, 2**33):
            for name, number in purposes.items():
                for draw in (0, 3):
                    value = _core.random_uniform(seed, position, name, draw)
                    assert value == uniform(seed, position, number, draw)
                    seen.add(value)
            assert _core_testing.token_uniform(seed, position) == uniform(seed, position, TOKEN)
    assert len(seen) == 3 * 3 * 3 * 2


GOOD = np.full((2, 4), 0.25, np.float32)


def changed(row: int, column: int, value: float) -> np.ndarray:
    probs = GOOD.copy()
    probs[row, column] = value
    return probs


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"probs": GOOD[:1]}, ValueError, "probs has 1 rows for 2 drafts"),
        ({"probs": GOOD[:, :3]}, ValueError, "probs has 3 columns, the vocabulary has 4"),
        ({"probs": GOOD[0]}, ValueError, "probs has shape"),
        ({"probs": GOOD.astype(np.float64)}, TypeError, "probs has dtype float64"),
        ({"probs": GOOD.T.copy().T}, ValueError, "on its last axis"),
        ({"probs": "row"}, TypeError, "give a tensor"),
        ({"probs": changed(1, 3, np.nan)}, ValueError, r"probs\[1, 3\] = nan"),
        ({"probs": changed(0, 3, np.inf)}, ValueError, r"probs\[0, 3\] = inf"),
        ({"probs": changed(1, 0, -0.25)}, ValueError, r"probs\[1, 0\] = -0.25"),
        ({"probs": changed(1, 0, 0.35)}, ValueError, r"probs\[1\] sums to 1.1"),
        ({"probs": GOOD * 0.5}, ValueError, r"probs\[0\] sums to 0.5"),
        (
            {"probs": np.eye(4, dtype=np.float32)[[1, 3]]}, ValueError,
            "gives its own draft, token 2, probability 0",
        ),
        ({"parents": [-1, -1], "tokens": [1, 1]}, ValueError, "siblings of one token, 1"),
        ({"vocab_ids": np.array([0, 1])}, ValueError, "vocab_ids has shape"),
        ({"vocab_ids": np.array([0, 1, 2, 4])}, ValueError, r"vocab_ids\[3\] = 4"),
        ({"vocab_ids": np.array([0, 1, 2, -1])}, ValueError, r"vocab_ids\[3\] = -1"),
        ({"vocab_ids": np.array([0, 1, 2, 2**32 + 3])}, ValueError, r"vocab_ids\[3\] = -1"),
        ({"vocab_ids": np.array([0, 1, 2, 1])}, ValueError, r"vocab_ids\[3\] = 1 is there twice"),
        ({"vocab_ids": np.zeros(4, np.float32)}, TypeError, "vocab_ids has dtype float32"),
        (
            {"probs": np.full((2, 2), 0.5, np.float32), "vocab_ids": np.array([1, 3])}, ValueError,
            "draft 1 is token 2, which vocab_ids does not hold",
        ),
        ({"probs": None, "vocab_ids": np.arange(4)}, ValueError, "vocab_ids without probs"),
        ({"probs": None}, ValueError, "without probs is decided by sample_token"),
        ({"acceptance": "typcal"}, ValueError, "acceptance = 'typcal'"),
        ({"temperature": 0.0}, ValueError, "temperature = 0"),
        ({"parents": [-1, 1]}, ValueError, "parents"),
        ({"tokens": [1, 4]}, ValueError, "4"),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "tokens": [1, 2], "parents": [-1, 0], "seed": 0, "position": 0,
        "acceptance": "rejection", "temperature": 1.0, "probs": GOOD, **options,
    }  # fmt: skip
    with pytest.raises(error, match=text):
        _core_testing.accept_drafts(
            arguments.pop("tokens"), arguments.pop("parents"), np.zeros((3, 4), np.float32),
            **arguments,
        )  # fmt: skip
