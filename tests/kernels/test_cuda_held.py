"""Drafts that are held while the rows are weighed (cuda/accept/row_held.cuh): what is known before
the walk, beside what the host decides."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from accept_cases import Drafted, accept, host_accepts
from accept_scratch import known_of, scratch_for
from cuda_calls import ON_CUDA, ON_EMU_FAST, Target, checked

from reference.sampling_reference import Law

on_devices = pytest.mark.parametrize("target", [ON_EMU_FAST, ON_CUDA])
SHAPES = {
    "chain": [0, 1, 2, 3, 4],
    "siblings": [0, 0, 0, 0, 0],
    "tree": [0, 0, 1, 1, 2, 0, 4, 6, 6],
    "late siblings": [0, 1, 2, 3, 0, 1, 4, 0],
}
LAWS = [Law(1.0), Law(0.6), Law(0.8, top_k=40), Law(1.1, top_p=0.9), Law(1.0, min_p=0.02),
        Law(0.9, top_k=50, top_p=0.8)]  # fmt: skip


def drafted(
    rng: np.random.Generator,
    shape: list[int],
    vocab: int,
    law: Law,
    *,
    near: float = 0.4,
    replacement: bool = False,
    scores: np.ndarray | None = None,
) -> Drafted:
    """Drafts drawn from what a drafter says that is `near` the target; parents by node."""
    n = len(shape) + 1
    if scores is None:
        scores = rng.normal(0, 3, (n, vocab)).astype(np.float32)
    noisy = (scores + rng.normal(0, near, scores.shape)) / law.temperature
    rows = np.exp(noisy - noisy.max(1, keepdims=True))
    rows = (rows / rows.sum(1, keepdims=True)).astype(np.float32)
    parents, tokens, probs = [-1, *shape], [0], np.zeros((n, vocab), np.float32)
    for i in range(1, n):
        probs[i] = rows[parents[i]]
        q = probs[i].astype(np.float64)
        if not replacement:
            q[[tokens[j] for j in range(1, i) if parents[j] == parents[i]]] = 0.0
        tokens.append(int(rng.choice(vocab, p=q / q.sum())))
    return Drafted(
        tokens, parents, scores, law, int(rng.integers(2**60)), int(rng.integers(1000)),
        "rejection", (0.09, 0.3, 1.0), probs, replacement,
    )  # fmt: skip


def check_held(target: Target, requests: list[Drafted], rng: np.random.Generator) -> int:
    """The host's decisions, every one of them known before the walk; returns siblings rejected."""
    scratch = scratch_for(target, requests)
    got = accept(target, requests, rng, workspace=scratch)
    siblings = 0
    for r, found, known in zip(requests, got, known_of(scratch, requests), strict=True):
        path, token = host_accepts(r, None)
        assert (found.path, found.status) == (path, 0)
        assert found.emitted == [*(r.tokens[i] for i in path), token]
        for node, kept in zip([0, *path], [*path, -1], strict=True):
            after = token if kept < 0 else r.tokens[kept]
            assert (known[node].next, known[node].token) == (kept, after)
            children = [i for i in range(node + 1, len(r.tokens)) if r.parents[i] == node]
            siblings += children.index(kept) if kept >= 0 else len(children)
    return siblings


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("vocab", [300, 2500])
@on_devices
def test_the_walk_finds_everything_known(target: Target, vocab: int, law: Law) -> None:
    rng = np.random.default_rng([vocab, LAWS.index(law)])
    requests = [
        drafted(rng, shape, vocab, law, near=near, replacement=near == 1.0)
        for shape in SHAPES.values()
        for near in (0.05, 1.0, 4.0)
    ]
    assert check_held(target, requests, rng) > len(SHAPES)


@checked
def test_drafts_held_under_the_checker(target: Target) -> None:
    rng = np.random.default_rng(3)
    requests = [
        drafted(rng, SHAPES[name], vocab, law, near=1.0)
        for name, vocab, law in [("tree", 520, Law(1.0)), ("siblings", 520, Law(0.9, top_k=20)),
                                 ("late siblings", 520, Law(1.0, top_p=0.9))]
    ]  # fmt: skip
    assert check_held(target, requests, rng) > 0


@on_devices
def test_siblings_of_a_row_whose_cut_is_in_a_crowd(target: Target) -> None:
    """More tokens in the cut's bin than a block has threads: the list's weights are from before the
    cut, which is found by bisection."""
    rng = np.random.default_rng(10)
    vocab, requests = 4000, []
    for law in (Law(1.0, top_k=100), Law(1.0, top_p=0.4)):
        for name in ("siblings", "tree"):
            scores = np.full((len(SHAPES[name]) + 1, vocab), -40.0, np.float32)
            for row in scores:
                near = (1.0 + np.arange(400) * 2.0**-22).astype(np.float32)
                row[rng.permutation(vocab)[:400]] = rng.permutation(near)
            requests.append(drafted(rng, SHAPES[name], vocab, law, near=1.0, scores=scores))
    assert check_held(target, requests, rng) > 0


@on_devices
def test_lists_of_several_batches_and_of_groups_with_several_tokens(target: Target) -> None:
    """Rows without drafts, whose token is known if it was drawn from their list."""
    rng = np.random.default_rng(9)
    vocab = 8 * 2100
    apart = np.full(vocab, -9.0, np.float32)  # one token of a group: more groups than in a batch
    apart[8 * rng.permutation(2100)[:1500]] = rng.uniform(0, 6, 1500)
    dense = np.full(vocab, -9.0, np.float32)  # eight: more tokens than a list holds
    groups = rng.permutation(2100)[:400]
    dense.reshape(-1, 8)[groups] = np.sort(rng.uniform(0, 6, (400, 1)), 0)
    dense[8 * groups[-100:]] += 2.0
    requests = [
        Drafted([0], [-1], row[None], law, seed, 3, "rejection", (0.09, 0.3, 1.0),
                np.zeros((1, vocab), np.float32), False)
        for row, laws in (
            (apart, [Law(1.0, top_k=1450), Law(1.0, top_k=1450, top_p=0.9), Law(2.0, top_p=0.6)]),
            (dense, [Law(1.0, top_k=500), Law(1.0, top_k=500, top_p=0.5), Law(1.0, top_p=0.5)]),
        )
        for law in laws
        for seed in (1, 2)
    ]  # fmt: skip
    assert check_held(target, requests, rng) == 0


@on_devices
def test_rows_of_several_pieces(target: Target) -> None:
    """A row of 9,000 tokens: sums, what is left, and draws by several blocks."""
    rng = np.random.default_rng(5)
    requests = [
        drafted(rng, [0, 0, 1, 2, 2], 9000, law, near=near)
        for law in (Law(1.0), Law(0.8, top_k=30), Law(1.0, top_p=0.95))
        for near in (0.05, 1.5)
    ]
    assert check_held(target, requests, rng) > 0


@on_devices
def test_a_draft_of_the_law_itself_is_kept(target: Target) -> None:
    """Its probability is exactly the target's, whatever the number."""
    rng = np.random.default_rng(6)
    scores = np.full((2, 64), -math.inf, np.float32)
    scores[:, [5, 9]] = 2.0
    probs = np.zeros((2, 64), np.float32)
    probs[:, [5, 9]] = 0.5
    requests = [
        Drafted([0, 5], [-1, 0], scores, Law(1.0), seed, 3, "rejection", (0.09, 0.3, 1.0), probs,
                False)
        for seed in range(24)
    ]  # fmt: skip
    assert check_held(target, requests, rng) == 0


@pytest.mark.parametrize("vocab", [2048, 2059])
@on_devices
def test_probabilities_are_summed_unit_by_unit(target: Target, vocab: int) -> None:
    """Probabilities of every exponent down to the smallest float, zeros of either sign, one above
    1; chunks that are full, and one that is not."""
    rng = np.random.default_rng(7)
    requests = []
    for seed in range(8):
        tiny = np.geomspace(1e-45, 2.0**-9, vocab - 2).astype(np.float32)
        probs = np.zeros((2, vocab), np.float32)
        probs[1, 2:] = rng.permutation(tiny) * np.float32(0.9 if seed % 2 else 0.01)
        probs[1, 1] = -0.0
        rest = np.float32(1.0 + (seed - 4) * 2e-4) - probs[1].astype(np.float64).sum()
        probs[1, 0] = np.float32(1.0009 if seed == 7 else rest)
        if seed == 7:
            probs[1, 2:] = tiny * np.float32(1e-5)
        scores = rng.normal(0, 1, (2, vocab)).astype(np.float32)
        requests.append(
            Drafted([7, 0], [-1, 0], scores, Law(1.0), seed, 3, "rejection", (0.09, 0.3, 1.0),
                    probs, bool(seed % 2))
        )  # fmt: skip
    scratch = scratch_for(target, requests)
    accept(target, requests, rng, workspace=scratch)
    for r, known in zip(requests, known_of(scratch, requests), strict=True):
        assert r.probs is not None
        exact = np.rint(r.probs[1].astype(np.float64) * 2.0**43)  # ties to even
        assert known[1].mass == int(exact.astype(np.int64).sum())
    assert check_held(target, requests, rng) > 0


@on_devices
def test_what_is_not_held_is_looked_at_by_the_walk(target: Target) -> None:
    """Probabilities that are none, the first drafts' rejected: flagged, later siblings not held."""
    rng = np.random.default_rng(8)
    requests = []
    for broken in range(1, 6):
        r = drafted(rng, SHAPES["siblings"], 300, Law(1.0), near=3.0)
        assert r.probs is not None
        r.probs[broken, 11] = math.nan
        requests.append(r)
    scratch = scratch_for(target, requests)
    got = accept(target, requests, rng, workspace=scratch)
    flagged = 0
    for r, found, known in zip(requests, got, known_of(scratch, requests), strict=True):
        assert r.probs is not None
        whole = dataclasses.replace(r, probs=np.nan_to_num(r.probs, nan=0.0))
        path, token = host_accepts(whole, None)
        broken = int(np.isnan(r.probs).any(1).argmax())
        if path and path[0] < broken:  # an earlier one was kept
            assert (found.path, found.emitted, found.status) == (
                path,
                [r.tokens[path[0]], token],
                0,
            )
            assert known[0].next == path[0]
        else:
            flagged += 1
            assert (found.path, found.status, known[0].next) == ([], 32, 0)
    assert flagged > 1


@on_devices
def test_a_cut_beyond_the_list(target: Target) -> None:
    """Nothing is held against such rows beforehand; others of the step are."""
    rng = np.random.default_rng(9)
    flat = drafted(rng, SHAPES["tree"], 5000, Law(40.0, top_p=0.99), near=3.0)
    other = drafted(rng, SHAPES["tree"], 5000, Law(1.0), near=0.5)
    requests = [flat, other]
    scratch = scratch_for(target, requests)
    got = accept(target, requests, rng, workspace=scratch)
    for r, found in zip(requests, got, strict=True):
        path, token = host_accepts(r, None)
        assert found.emitted == [*(r.tokens[i] for i in path), token]
    known = known_of(scratch, requests)
    assert [row.next for row in known[0]] == [0] * len(flat.tokens)
    assert known[1][0].next != 0


@pytest.mark.parametrize("rule", ["threshold", "best_beam", "typical"])
@on_devices
def test_other_rules_use_the_sums(target: Target, rule: str) -> None:
    rng = np.random.default_rng(10)
    numbers = (float(np.float32(0.2)), float(np.float32(0.6)), 0.25)
    requests = [
        dataclasses.replace(drafted(rng, shape, 700, law), rule=rule, numbers=numbers)
        for shape in SHAPES.values()
        for law in LAWS[:3]
    ]
    scratch = scratch_for(target, requests)
    got = accept(target, requests, rng, workspace=scratch)
    for r, found, known in zip(requests, got, known_of(scratch, requests), strict=True):
        path, token = host_accepts(r, None)
        assert found.emitted == [*(r.tokens[i] for i in path), token]
        assert all((row.mass > 0) == (rule != "typical") for row in known[1:])
