"""Greedy acceptance along a draft tree against a walk over every node's path. Exact."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reference import lookahead_reference as ref
from specdec_ext import _core_testing


def accept(tokens, parents, sampled, max_path=None):
    path, emitted, bad = _core_testing.accept_greedy(tokens, parents, sampled, max_path)
    return path.tolist(), emitted.tolist(), bad


def test_golden_only():
    assert accept([7], [-1], [9]) == ([], [9], -1)


def test_chain_and_rejection():
    parents = [-1, 0, 1, 2]
    assert accept([1, 2, 3, 4], parents, [2, 3, 4, 5]) == ([1, 2, 3], [2, 3, 4, 5], -1)
    assert accept([1, 2, 3, 4], parents, [2, 3, 9, 5]) == ([1, 2], [2, 3, 9], -1)
    assert accept([1, 2, 3, 4], parents, [8, 3, 4, 5]) == ([], [8], -1)


def test_clip():
    tokens, parents, sampled = [1, 2, 3, 4], [-1, 0, 1, 2], [2, 3, 4, 5]
    assert accept(tokens, parents, sampled, 2) == ([1, 2], [2, 3, 4], -1)
    assert accept(tokens, parents, sampled, 0) == ([], [2], -1)
    assert accept(tokens, parents, sampled, -5) == ([], [2], -1)


def test_first_on_ties_and_equal_siblings():
    # Two children with the same token; only the second one leads deeper.
    assert accept([1, 5, 5, 6], [-1, 0, 0, 2], [5, 6, 6, 7]) == ([2, 3], [5, 6, 7], -1)
    # Both one deep: the first.
    assert accept([1, 5, 5], [-1, 0, 0], [5, 8, 9]) == ([1], [5, 8], -1)


def test_nan_rows():
    # A NaN row off the path does not matter.
    assert accept([1, 5, 6], [-1, 0, 0], [5, 7, -1]) == ([1], [5, 7], -1)
    # On the path it is reported, and what was decided before it is still emitted.
    assert accept([1, 5], [-1, 0], [5, -1]) == ([1], [5], 1)
    assert accept([1, 5], [-1, 0], [-1, 5]) == ([], [], 0)
    # -1 never equals a token, not even a (corrupt) token of -1.
    assert accept([1, -1], [-1, 0], [-1, 3]) == ([], [], 0)


@pytest.mark.parametrize("vocab", [1, 2, 3, 10])
def test_random(vocab):
    rng = random.Random(vocab)
    longest = 0
    for _ in range(1500):
        n = rng.choice([1, 2, 5, 20, 64, 128])
        chainy = rng.random()
        parents = [-1] + [i - 1 if rng.random() < chainy else rng.randrange(i) for i in range(1, n)]
        tokens = [rng.randrange(vocab) for _ in range(n)]
        sampled = [-1 if rng.random() < 0.03 else rng.randrange(vocab) for _ in range(n)]
        max_path = rng.choice([0, 1, 3, 6, 127])
        expected = ref.accept(tokens, parents, sampled, max_path)
        assert accept(tokens, parents, sampled, max_path) == expected
        longest = max(longest, len(expected[0]))
    assert longest >= 3


@pytest.mark.parametrize(
    ("tokens", "parents", "sampled", "match"),
    [
        ([], [], [], "draft_tree.size = 0"),
        ([1] * 129, [-1, *range(128)], [1] * 129, "draft_tree.size = 129: a tree has 1..128"),
        ([1, 2], [-1, 1], [1, 2], r"parents\[1\] = 1: a parent comes before its child"),
        ([1, 2], [-1, 0], [1], "sampled has 1 entries, the tree 2 nodes"),
        ([1], [-1, 0], [1, 2], "tokens has 1 entries, parents 2"),
        ([[1]], [-1], [1], "tokens has 2 dimensions"),
    ],
)
def test_refused(tokens, parents, sampled, match):
    with pytest.raises(ValueError, match=match):
        _core_testing.accept_greedy(np.array(tokens, np.int32), parents, sampled)
