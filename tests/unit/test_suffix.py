"""Suffix decoding: trees by hand, then random text against the definition (brute force). Exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import suffix_reference as reference
from specdec_ext import _core_testing

ONE = reference.ONE


def index_of(tokens: list[int], room: int = 0) -> _core_testing.SuffixIndex:
    index = _core_testing.SuffixIndex(max(1, len(tokens) + room))
    index.extend(tokens)
    return index


def drafted(index: _core_testing.SuffixIndex, count: int, **limits: int) -> list[reference.Node]:
    return [reference.Node(*node) for node in zip(*index.draft(count, **limits), strict=True)]


def words(text: str, count: int, **limits: int) -> list[str]:
    """Every draft with the path above it, letters as tokens, best first."""
    paths: list[str] = []
    for node in drafted(index_of([ord(c) for c in text]), count, **limits):
        above = paths[node.parent] if node.parent >= 0 else ""
        paths.append(above + chr(node.token))
    return paths


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("abcd", []),  # nothing repeats
        ("abcdefxab", ["c", "cd", "cde", "cdef"]),
        ("abxab", ["x", "xa", "xab"]),  # up to the end of the text
        ("aaaa", ["a", "aa", "aaa"]),
        # Two continuations that occurred once each: the recent one first, then deeper ones.
        ("qa.qb,q", ["b", "a", "b,", "a.", "b,q", "a.q", "a.qb"]),
        # What occurred twice is likelier than what occurred once.
        ("qa.qa,qb;q", ["a", "b"]),
    ],
)
def test_by_hand(text: str, paths: list[str]) -> None:
    assert words(text, 10)[: len(paths)] == paths
    assert bool(words(text, 10)) == bool(paths)


def test_longer_matches_weigh_more() -> None:
    # "b" was followed by x lately, but "ab" by y.
    assert words("aby.cbx.ab", 2)[0] == "y"
    [first, *_] = drafted(index_of([ord(c) for c in "aby.cbx.ab"]), 2)
    assert first.share == ONE * 4 // 6
    assert first.match == 2


def test_limits() -> None:
    text = "abcdefghabcdefghab"
    assert words(text, 3) == ["c", "cd", "cde"]
    assert words(text, 10, max_depth=2) == ["c", "cd"]
    assert words(text, 10, max_tree_depth=4) == ["c", "cd", "cde", "cdef"]
    # A match of 10 tokens, three drafts for four of them.
    assert len(words(text, 10, spec_factor=ONE * 3 // 4)) == 7
    # A chance of 0.95 a token: 0.95 ** 8 > 0.65 > 0.95 ** 9.
    assert len(words(text, 10, min_prob=int(0.65 * ONE))) == 8
    assert words(text, 0) == []
    assert words(text, 10, max_depth=0) == []


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 6).flatmap(lambda v: st.lists(st.integers(0, v), min_size=1, max_size=90)),
    st.integers(0, 20),
    st.integers(1, 30),
    st.integers(0, ONE),
    st.sampled_from([0, ONE // 2, ONE, 3 * ONE]),
    st.integers(0, 12),
)
def test_random_text(
    tokens: list[int], count: int, deep: int, least: int, factor: int, room: int
) -> None:
    limits = {
        "max_tree_depth": deep, "min_prob": least, "spec_factor": factor, "max_depth": room,
    }  # fmt: skip
    assert drafted(index_of(tokens), count, **limits) == reference.draft(tokens, count, **limits)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_text_that_grows_piece_by_piece(data: st.DataObject, vocab: int) -> None:
    index = _core_testing.SuffixIndex(160)
    text: list[int] = []
    while len(text) < 120:
        piece = data.draw(st.lists(st.integers(0, vocab), min_size=1, max_size=30))
        index.extend(piece)
        text += piece
        assert drafted(index, 10) == reference.draft(text, 10)


def test_trees_are_ordered_and_cut_at_any_length() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        tokens = rng.integers(0, 4, 200).tolist()
        index = index_of(tokens)
        nodes = drafted(index, 60)
        probs = [node.prob for node in nodes]
        assert probs == sorted(probs, reverse=True)
        assert all(node.parent < i for i, node in enumerate(nodes))
        for count in (1, 7, 30):
            assert drafted(index, count) == nodes[:count]


def test_a_long_text() -> None:
    """Every pattern is found in 60,000 tokens, as in the tables of a dictionary."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 5000, 60_000)
    for _ in range(200):
        at, to = sorted(rng.integers(0, len(tokens) - 100, 2))
        tokens[to : to + 60] = tokens[at : at + 60]
    text = tokens.tolist()
    index = _core_testing.SuffixIndex(len(text))
    index.extend(text[:59_000])
    hits = 0
    for end in range(59_000, 60_000, 50):
        nodes = drafted(index, 10)
        assert nodes == reference.draft(text[:end], 10)
        hits += bool(nodes)
        index.extend(text[end : end + 50])
    assert hits > 5


def test_memory_is_fixed_by_the_longest_text() -> None:
    """Three tables of twice as many entries as tokens (a power of two), links between them."""
    for limit in (1, 100, 4096, 65536):
        entries = max(16, 1 << (2 * limit - 1).bit_length())
        index = _core_testing.SuffixIndex(limit)
        assert index.nbytes - 3 * (12 * entries + 4 * limit) < 2048
    with pytest.raises(ValueError, match="1 tokens more, there is room for 0"):
        index_of([1, 2]).extend([3])


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"suffix\.max_seq_len = 0: use 1 or more"):
        _core_testing.SuffixIndex(0)
    index = index_of([1])
    with pytest.raises(ValueError, match=r"suffix\.max_tree_depth = 65: give 1\.\.64"):
        index.draft(4, max_tree_depth=65)
    with pytest.raises(ValueError, match=r"suffix\.max_draft_len = 128: give 0\.\.127"):
        index.draft(128)
