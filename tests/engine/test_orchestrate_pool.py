"""The n-gram pool of speculation as an external loop."""

from __future__ import annotations

import random

import pytest

from specdec_ext.orchestrate import (
    PromptLookupPool,
)


def test_pool_by_hand() -> None:
    pool = PromptLookupPool(max_draft_len=3, max_matching_ngram_size=2)
    text = [1, 2, 3, 4, 1, 2]
    pool.extend(text)
    assert pool.propose(text) == [3, 4, 1]
    assert pool.propose([9, 2]) == [3, 4, 1]  # the longer pattern is unknown, the shorter is not
    assert pool.propose([1, 9]) == []
    text += [5, 6, 7, 1, 2]
    pool.extend(text)
    assert pool.propose(text) == [3, 4, 1]
    newest = PromptLookupPool(3, 2, is_use_oldest=False)
    newest.extend(text)
    assert newest.propose(text) == [5, 6, 7]
    single = PromptLookupPool(3, 2, is_keep_all=False)
    single.extend(text)
    assert single.propose(text) == [5, 6, 7]
    assert len(single) < len(newest)


def test_pool_completes_what_the_end_of_the_text_cut_short() -> None:
    pool = PromptLookupPool(4, 1)
    text = [7, 8]
    pool.extend(text)
    assert pool.propose([1, 7]) == [8]
    for token in (9, 10, 11, 12):
        text.append(token)
        pool.extend(text)
    assert pool.propose([1, 7]) == [8, 9, 10, 11]


@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize("oldest", [True, False])
def test_pool_proposes_what_stood_behind_the_longest_pattern(keep_all: bool, oldest: bool) -> None:
    rng = random.Random(f"{keep_all} {oldest}")
    for _ in range(60):
        length, size = rng.randint(1, 5), rng.randint(1, 4)
        pool = PromptLookupPool(length, size, keep_all, oldest)
        text = [rng.randrange(4) for _ in range(rng.randint(1, 6))]
        for _ in range(12):
            pool.extend(text)
            draft = pool.propose(text)
            behind = []
            for n in range(min(size, len(text) - 1), 0, -1):
                ends = [i for i in range(n, len(text)) if text[i - n : i] == text[-n:]]
                behind = [text[i : i + length] for i in ends]
                if behind:
                    break
            assert bool(draft) == bool(behind)
            if draft:
                assert draft in behind
                full = [b for b in behind if len(b) == length]
                if full and oldest and keep_all:
                    assert draft == full[0]
                if not keep_all:
                    assert draft == behind[-1]
            text += [rng.randrange(4) for _ in range(rng.randint(1, 4))]
