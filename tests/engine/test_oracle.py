"""Drafts from outside: whatever is proposed, the text is the target's own.

Perfect, wrong, right for j tokens, trees with the right path in scattered slots, empty and invalid
proposals. The steps are checked too: a perfect proposal of k tokens is accepted whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from driver import Delivery, hash_engine

from hash_target import HashFunction

PROMPT = [3, 1, 4, 1, 5]
LENGTH = 70
Proposal = tuple[list[int], list[int] | None]
# (tokens that will come next, random) -> proposal
Oracle = Callable[[list[int], random.Random], Proposal | None]


def decode_with(oracle: Oracle, page_size: int = 4, seed: int = 0, neighbours: int = 0) -> Delivery:
    """Decodes PROMPT while `oracle` proposes before every decode step; checks the text."""
    function = HashFunction(vocab=30, surprise=1, seed=seed + 1)
    expected = function.reference(PROMPT, LENGTH)
    engine = hash_engine(
        function,
        page_size=page_size,
        max_batch_size=1 + neighbours,
        max_seq_len=256,
        method="proposed",
    )
    rng = random.Random(seed)
    rid = engine.ex.submit(PROMPT, max_tokens=LENGTH)
    others = [engine.ex.submit([i + 1, 7], max_tokens=LENGTH) for i in range(neighbours)]
    delivery = Delivery()
    texts: dict[int, list[int]] = {other: [] for other in others}
    while engine.ex.num_unfinished:
        if engine.ex.decoding(rid):
            done = len(engine.ex.history(rid)) - len(PROMPT)
            proposal = oracle(expected[done:], rng)
            if proposal is not None:
                tokens, parents = proposal
                engine.ex.propose(rid, tokens, parents)
        for out in engine.step() or []:
            if out.request_id == rid:
                engine.record(delivery, out)
            else:
                texts[out.request_id] += out.tokens
    assert delivery.tokens == expected
    assert delivery.finish_reason == "length"
    for i, other in enumerate(others):
        assert texts[other] == function.reference([i + 1, 7], LENGTH)
    engine.assert_idle()
    return delivery


def wrong(token: int) -> int:
    return (token + 1) % 30


@pytest.mark.parametrize("length", [1, 2, 5, 13])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_perfect_chain(length: int, page_size: int) -> None:
    got = decode_with(lambda future, _: (future[:length], None), page_size)
    # One token from the prompt, then whole proposals plus the target's own token each step.
    assert got.forwards == 1 + -(-(LENGTH - 1) // (length + 1))
    assert got.num_accepted >= LENGTH - 1 - got.forwards


@pytest.mark.parametrize("length", [1, 4, 40, 127])
def test_always_wrong(length: int) -> None:
    got = decode_with(lambda future, _: ([wrong(t) for t in (future * 40)[:length]], None))
    assert got.forwards == LENGTH
    assert got.num_accepted == 0


@pytest.mark.parametrize("good", [0, 1, 2, 6])
def test_right_then_wrong(good: int) -> None:
    def oracle(future: list[int], _: random.Random) -> Proposal:
        return [t if i < good else wrong(t) for i, t in enumerate(future[:9])], None

    got = decode_with(oracle, page_size=2, neighbours=2)
    assert got.forwards == 1 + -(-(LENGTH - 1) // (good + 1))


def test_empty_and_absent_proposals() -> None:
    assert decode_with(lambda *_: ([], None)).forwards == LENGTH
    assert decode_with(lambda *_: None).forwards == LENGTH


def test_a_proposal_is_used_once() -> None:
    """Drafts belong to the step they were handed in for; later steps have none."""
    handed = []

    def oracle(future: list[int], _: random.Random) -> Proposal | None:
        if handed:
            return None
        handed.append([wrong(token) for token in future[:4]])
        return handed[0], None

    got = decode_with(oracle)
    assert got.num_drafts == 4
    assert got.forwards == LENGTH


def test_drafts_end_with_the_request() -> None:
    """A proposal longer than what is left is cut: its rows would answer nothing."""
    drafts = []

    def oracle(future: list[int], _: random.Random) -> Proposal:
        drafts.append(min(9, len(future) - 1))
        return [wrong(token) for token in future[:9]] + [1] * (9 - len(future)), None

    got = decode_with(oracle)
    assert got.num_drafts == sum(drafts)


def random_tree(future: list[int], rng: random.Random) -> Proposal:
    """A random tree of wrong tokens in which a prefix of the truth lies in scattered slots."""
    size = rng.randint(1, 60)
    right = rng.randint(0, min(size, len(future), 8))
    places = sorted(rng.sample(range(size), right))
    tokens: list[int] = []
    parents: list[int] = []
    path: list[int] = []  # indices of the right nodes so far
    depths: list[int] = []
    for i in range(size):
        if i in places:
            parent = path[-1] if path else -1
            tokens.append(future[len(path)])
            path.append(i)
        else:
            parent = rng.randint(-1, i - 1)
            depth = depths[parent] + 1 if parent >= 0 else 0
            tokens.append(wrong(future[depth]) if depth < len(future) else rng.randrange(30))
        parents.append(parent)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return tokens, parents


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_random_trees(page_size: int) -> None:
    """Accepted rows lie in scattered slots: compaction moves every layer's K and V."""
    for seed in range(6):
        got = decode_with(random_tree, page_size, seed=seed, neighbours=seed % 3)
        assert got.forwards < LENGTH
        assert got.num_accepted > 0


def test_duplicate_siblings() -> None:
    """Equal siblings are allowed; the deepest right path wins wherever it hangs."""

    def oracle(future: list[int], _: random.Random) -> Proposal | None:
        if len(future) < 3:
            return None
        a, b, c = future[:3]
        return [a, a, wrong(b), b, c], [-1, -1, 0, 1, 3]

    got = decode_with(oracle)
    assert got.forwards < LENGTH // 3


@pytest.mark.parametrize(
    ("tokens", "parents", "text"),
    [
        ([30], [-1], "30"),
        ([-1], [-1], "-1"),
        ([1 << 30], [-1], "1073741824"),
        ([1, 2], [-1, 1], "parents"),
        ([1, 2], [-1, -2], "parents"),
        ([1, 2], [-1], "parents"),
        ([1] * 128, None, "128"),
    ],
)
def test_invalid_proposals_are_refused(
    tokens: list[int], parents: list[int] | None, text: str
) -> None:
    """A bad proposal is an error of the caller; the request goes on as if nothing was said."""
    refused = []

    function = HashFunction(vocab=30, surprise=1)
    engine = hash_engine(function, max_batch_size=1, max_seq_len=256, method="proposed")
    rid = engine.ex.submit(PROMPT, max_tokens=10)
    got: list[int] = []
    while engine.ex.num_unfinished:
        if engine.ex.decoding(rid):
            with pytest.raises(ValueError, match=text) as info:
                engine.ex.propose(rid, tokens, parents)
            refused.append(info.value)
        for out in engine.step() or []:
            got += out.tokens
    assert len(refused) == 9
    assert got == function.reference(PROMPT, 10)


def test_proposal_for_unknown_or_finished_request() -> None:
    engine = hash_engine(HashFunction(), max_batch_size=1, method="proposed")
    with pytest.raises(ValueError, match="not running"):
        engine.ex.propose(99, [1], None)
