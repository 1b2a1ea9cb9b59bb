"""What is derived from a draft tree: depths, mask, paths; and what is not a draft tree."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specdec_ext import _core_testing


def test_small_tree():
    #   0 -> 1 -> 3
    #     -> 2 -> 4 -> 5
    parents = [-1, 0, 0, 1, 2, 4]
    assert _core_testing.tree_depths(parents).tolist() == [0, 1, 1, 2, 2, 3]
    assert _core_testing.tree_mask(parents)[:, 0].tolist() == [
        0b000001,
        0b000011,
        0b000101,
        0b001011,
        0b010101,
        0b110101,
    ]
    assert not _core_testing.tree_mask(parents)[:, 1:].any()
    assert _core_testing.tree_path(parents, 5).tolist() == [2, 4, 5]
    assert _core_testing.tree_path(parents, 0).tolist() == []


def test_random_trees():
    rng = random.Random(0)
    for _ in range(400):
        n = rng.choice([1, 2, 31, 32, 33, 64, 65, 100, 127, 128])
        parents = [-1] + [
            rng.randrange(max(0, i - rng.choice([1, 3, 200])), i) for i in range(1, n)
        ]
        depths, mask = _core_testing.tree_depths(parents), _core_testing.tree_mask(parents)
        assert mask.dtype == np.uint32 and mask.shape == (n, 4)
        for node in range(n):
            line = []
            at = node
            while at != -1:
                line.append(at)
                at = parents[at]
            bits = sum(int(word) << (32 * i) for i, word in enumerate(mask[node]))
            assert bits == sum(1 << i for i in line)
            assert depths[node] == len(line) - 1
            assert _core_testing.tree_path(parents, node).tolist() == line[:-1][::-1]


@pytest.mark.parametrize(
    ("tokens", "parents", "vocab", "match"),
    [
        ([], [], 0, "draft_tree.size = 0: a tree has 1..128 nodes"),
        ([0] * 129, [-1, *range(128)], 0, "draft_tree.size = 129"),
        ([1], [0], 0, r"parents\[0\] = 0: node 0 is the golden token"),
        ([1, 2, 3], [-1, 0, 2], 0, r"parents\[2\] = 2: a parent comes before its child \(0..1\)"),
        ([1, 2, 3], [-1, 0, -1], 0, r"parents\[2\] = -1"),
        ([1, 2], [-1, 0], 2, r"tokens\[1\] = 2: token ids are 0..1"),
        ([1, -1], [-1, 0], 2, r"tokens\[1\] = -1"),
    ],
)
def test_validate_refuses(tokens, parents, vocab, match):
    with pytest.raises(ValueError, match=match):
        _core_testing.validate_tree(
            np.array(tokens, np.int32), np.array(parents, np.int32), vocab_size=vocab
        )


def test_validate_accepts():
    _core_testing.validate_tree([5, 6, 7], [-1, 0, 0], vocab_size=8)
    _core_testing.validate_tree([5, 2**31 - 1], [-1, 0])


def test_derivations_refuse_a_bad_tree():
    for function in (_core_testing.tree_depths, _core_testing.tree_mask):
        with pytest.raises(ValueError, match="a parent comes before its child"):
            function([-1, 1])
    with pytest.raises(ValueError, match=r"node = 2: the tree has nodes 0..1"):
        _core_testing.tree_path([-1, 0], 2)
