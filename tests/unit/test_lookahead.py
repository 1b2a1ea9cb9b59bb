"""Lookahead against the published vectors and an independent pure-Python reference: exact."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from reference import lookahead_reference as ref
from specdec_ext import _core_testing

SIZES = (1, 3, 5, 7)
MIXED = ((2, 1), (3, 2), (5, 3), (7, 4))


def valid(w: int, n: int, g: int) -> bool:
    return (n > 1 or (w == 1 and g == 0)) and ref.max_draft_len(w, n, g) <= 127


GRID = sorted(
    {t for t in product(SIZES, SIZES, (0, *SIZES)) if valid(*t)}
    | {(a, n, b) for (a, b), n in product(MIXED, range(2, 8)) if valid(a, n, b)}
    | {(b, n, a) for (a, b), n in product(MIXED, range(2, 8)) if valid(b, n, a)}
    | {(1, 1, 0), (2, 2, 1), (4, 3, 4), (7, 7, 7), (128, 2, 0), (1, 2, 127), (1, 129, 0)}
)


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def word(gram: list[int]) -> str:
    return "".join(map(chr, gram))


# ---- formulas and refusals


@pytest.mark.parametrize(
    ("triple", "expected"),
    [
        ((7, 7, 7), 83),
        ((2, 2, 1), 2),
        ((1, 1, 0), 0),
        ((4, 3, 4), 15),
        ((3, 3, 3), 11),
        ((10, 9, 8), 143),
    ],
)
def test_max_draft_len(triple, expected):
    assert _core_testing.lookahead_max_draft_len(*triple) == expected


@pytest.mark.parametrize("triple", [(0, 2, 1), (1, 0, 0), (1, 2, -1), (2, 1, 0), (1, 1, 1)])
def test_max_draft_len_refuses(triple):
    with pytest.raises(ValueError, match=r"needs W >= 1, N >= 1, G >= 0"):
        _core_testing.lookahead_max_draft_len(*triple)


@pytest.mark.parametrize(
    ("triple", "match"),
    [
        ((0, 2, 1), r"\[0,2,1\]: window size 0 is below 1"),
        ((1, 0, 0), r"n-gram size 0 is below 1"),
        ((1, 2, -1), r"verification-set size -1 is below 0"),
        ((2, 1, 0), r"n-gram size 1 drafts nothing"),
        ((1, 1, 3), r"use \[1,1,0\] for plain decoding"),
        ((10, 9, 8), r"needs 143 draft tokens per step, the limit is 127"),
        ((2**31 - 1, 2**31 - 1, 2**31 - 1), r"needs \d+ draft tokens"),
    ],
)
def test_config_refused(triple, match):
    with pytest.raises(ValueError, match=match):
        _core_testing.check_lookahead_config(*triple)
    with pytest.raises(ValueError, match=match):
        _core_testing.Lookahead(*triple, prompt=[1])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, -2]}, r"prompt\[1\] = -2"),
        ({"prompt": [1], "pool_grams": 0}, "pool_grams = 0: use 1"),
    ],
)
def test_state_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        _core_testing.Lookahead(2, 3, 2, **kwargs)


def test_update_refuses_a_wrong_number_of_samples():
    state = _core_testing.Lookahead(2, 3, 2, prompt=[1, 2, 3])
    with pytest.raises(ValueError, match="sampled has 1 entries, the last draft has 0"):
        state.update([5], [5])
    tokens, _, _ = state.draft(3)
    with pytest.raises(ValueError, match=f"the last draft has {len(tokens)} nodes"):
        state.update([5], [5])
    with pytest.raises(ValueError, match=r"accepted\[0\] = -1"):
        state.update([5] * len(tokens), [-1])
    with pytest.raises(ValueError, match="golden = -1"):
        state.draft(-1)


# ---- the published vectors of the pool


def test_published_pool_vectors():
    state = _core_testing.Lookahead(1, 4, 5, prompt=ids("hello world; hello world. live is life."))
    entries = lambda: [word(g) for g in state.pool_entries(ord("l"))]  # noqa: E731
    assert entries() == ["lo ", "o w", "d. ", "ive", "ife"]
    # Feed "labc": grams "abc" under "l"; the tail before it is "fe.".
    state.update([], ids("labc"))
    assert entries() == ["o w", "d. ", "ive", "ife", "abc"]
    state.update([], ids(" lo w"))  # "lo w": re-insertion of "o w" under "l" only reorders
    assert entries() == ["d. ", "ive", "ife", "abc", "o w"]


def test_pool_from_prompt_and_output():
    state = _core_testing.Lookahead(1, 3, 2, prompt=ids("abc"))
    assert [word(g) for g in state.pool_entries(ord("a"))] == ["bc"]
    assert state.pool_entries(ord("b")) == []
    state.update([], ids("d"))
    assert [word(g) for g in state.pool_entries(ord("b"))] == ["cd"]
    assert word(state.tail.tolist()) == "cd"


# ---- layout of a step


def test_warm_up_lengths():
    """(7,7,7): 11, 17, 23, 29, 35 tokens of the lookahead branch, then 41; tokens all different."""
    prompt = list(range(1000, 2000))
    state = ref.Lookahead(7, 7, 7, prompt, 3, 4096)
    ours = _core_testing.Lookahead(7, 7, 7, prompt=prompt, seed=3)
    fresh = iter(range(10_000, 100_000))
    state.update([], [5])
    ours.update([], [5])
    lengths = []
    for _ in range(8):
        draft = state.draft(5, guesses=0)
        tokens, _, origin = ours.draft(5, guesses=0)
        assert tokens.tolist() == draft.tokens
        assert not (origin & ref.GUESS).any()
        lengths.append(draft.unmerged)
        sampled = [next(fresh) for _ in tokens]
        state.update(sampled, [5])
        ours.update(sampled, [5])
    assert lengths == [11, 17, 23, 29, 35, 41, 41, 41]


def test_layout_of_the_worked_example():
    """W=3, N=4: the table of the description, tokens and positions, for f = 1, 2, 3."""
    state = _core_testing.Lookahead(3, 4, 2, prompt=list(range(100, 1100)), seed=1)
    p = state.prefill.tolist()
    assert len(p) == 2
    names: dict[int, str] = {p[1]: "P1"}
    expected = {
        1: ("P1 a0 b0 c0", [1, 2, 3, 4]),
        2: ("a0 a1 b0 b1 c0 c1", [1, 2, 2, 3, 3, 4]),
        3: ("a1 a2 b0 b1 b2 c0 c1 c2", [1, 2, 1, 2, 3, 2, 3, 4]),
    }
    for f in (1, 2, 3):
        for row, letter in enumerate("abc"):
            for column in range(f):
                names[int(state.window[row, column])] = f"{letter}{column}"
        assert len(names) >= 1 + 3 * f, "all tokens differ"
        tokens, parents, _ = state.draft(1)
        text, depths = expected[f]
        assert " ".join(names[t] for t in tokens[1:].tolist()) == text
        assert _core_testing.tree_depths(parents)[1:].tolist() == depths
        state.update([5000 * f + i for i in range(len(tokens))], [1])


def test_row_zero_enters_the_pool_under_the_golden_token():
    """The true predecessor of row 0 is the step's input golden token, not the next one."""
    state = _core_testing.Lookahead(2, 3, 4, prompt=[50, 60, 70], seed=0)
    state.draft(7)
    state.update([900] * len(state.draft(7)[0]), [8])  # f: 1 -> 2, full
    window = state.window.tolist()
    tokens, parents, _ = state.draft(8)
    sampled = [300 + i for i in range(len(tokens))]
    state.update(sampled, [sampled[0]])
    after = state.window.tolist()
    assert after[0][0] == window[0][1] and after[1][0] == window[1][1]
    assert after[0] in state.pool_entries(8)
    assert after[0] not in state.pool_entries(sampled[0])
    assert after[1] in state.pool_entries(window[1][0])
    _core_testing.validate_tree(tokens, parents)


def test_merged_origin():
    """A guess equal to window content is one node with both origins."""
    state = _core_testing.Lookahead(1, 2, 3, prompt=[4, 5, 4, 6, 4], seed=0)
    tokens, parents, origin = state.draft(4)
    assert tokens.tolist() == [4, 5, 6] and parents.tolist() == [-1, 0, 0]
    assert origin.tolist() == [0, ref.GUESS, ref.GUESS]
    state = _core_testing.Lookahead(2, 2, 3, prompt=[4, 4, 4], seed=0)
    tokens, parents, origin = state.draft(4)
    assert tokens.tolist() == [4, 4] and origin.tolist() == [0, ref.WINDOW | ref.GUESS]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_short_prompts(length):
    """A prompt shorter than N-1: no gram reaches before its start."""
    prompt = list(range(10, 10 + length))
    state = _core_testing.Lookahead(2, 5, 3, prompt=prompt)
    assert state.tail.tolist() == ([-1] * 4 + prompt)[-4:]
    text = list(prompt)
    for token in range(50, 60):
        state.update([], [token])
        text.append(token)
        for i, key in enumerate(text):
            grams = [text[i + 1 : i + 5]] if i + 5 <= len(text) else []
            assert state.pool_entries(key) == grams


def test_plain_triple_drafts_nothing():
    state = _core_testing.Lookahead(1, 1, 0, prompt=[3, 4])
    for token in (5, 6, 7):
        tokens, parents, _ = state.draft(token)
        assert tokens.tolist() == [token] and parents.tolist() == [-1]
        state.update([token + 1], [token + 1])
    assert state.nbytes < 4096


# ---- random cases against the reference


def same_state(ours, state, keys, context) -> None:
    assert [r[: len(x)] for r, x in zip(ours.window.tolist(), state.rows, strict=True)] == (
        state.rows
    ), context
    assert ours.fill.tolist() == [len(r) for r in state.rows], context
    assert ours.tail.tolist() == state.tail, context
    for key in keys:
        assert [tuple(g) for g in ours.pool_entries(key)] == state.pool.entries(key), context


def run_case(rng: random.Random, triple: tuple[int, int, int], *, budgets: bool, steps: int) -> int:
    vocab = rng.choice([2, 3, 5, 20, 300])
    prompt = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 3, 5, 8, 40, 150]))]
    seed = rng.getrandbits(64)
    grams = rng.choice([1, 20, 64, 4096])
    ours = _core_testing.Lookahead(*triple, prompt=prompt, seed=seed, pool_grams=grams)
    state = ref.Lookahead(*triple, prompt, seed, grams)
    assert ours.prefill.tolist() == state.prefill
    golden, compared = prompt[-1], 0
    for step in range(steps):
        context = (triple, seed, step)
        if rng.random() < 0.2:  # a step without speculation
            accepted = [rng.randrange(vocab)]
            ours.update([], accepted)
            state.update([], accepted)
        else:
            budget: dict[str, int] = {}
            if budgets:
                w, n, g = triple
                for name, top in (
                    ("window_rows", w),
                    ("guesses", g),
                    ("guess_len", n - 1),
                    ("max_drafts", 127),
                    ("max_depth", 20),
                ):
                    if rng.random() < 0.4:
                        budget[name] = rng.randint(0, top + 1)
            draft = state.draft(golden, **budget)
            tokens, parents, origin = ours.draft(golden, **budget)
            assert tokens.tolist() == draft.tokens, context
            assert parents.tolist() == draft.parents, context
            assert origin.tolist() == draft.origin, context
            assert len(tokens) - 1 <= ref.max_draft_len(*triple)
            assert len(tokens) - 1 <= budget.get("max_drafts", 127)
            depths = _core_testing.tree_depths(parents)
            assert depths.max() <= budget.get("max_depth", 127)
            assert ours.emitted_rows == len(state.emitted)
            mask = _core_testing.tree_mask(parents)
            for i, parent in enumerate(draft.parents):
                bits = mask[i].copy()
                bits[i >> 5] ^= np.uint32(1 << (i & 31))
                assert (bits == (mask[parent] if i else 0)).all(), context
            # Sampled ids near the tree's own tokens, so that paths are accepted now and then.
            sampled = [rng.choice([rng.randrange(vocab), *draft.tokens[:3]]) for _ in tokens]
            path, accepted, bad = ref.accept(draft.tokens, draft.parents, sampled, triple[1] - 1)
            got = _core_testing.accept_greedy(tokens, parents, sampled, triple[1] - 1)
            assert (got[0].tolist(), got[1].tolist(), got[2]) == (path, accepted, bad), context
            ours.update(sampled, accepted)
            state.update(sampled, accepted)
            compared += len(tokens)
        golden = accepted[-1]
        if step % 4 == 0 or step == steps - 1:
            same_state(ours, state, range(min(vocab, 40)), context)
    return compared


@pytest.mark.parametrize("budgets", [False, True], ids=["full", "budgets"])
@pytest.mark.parametrize("triple", GRID, ids=str)
def test_random_against_reference(triple, budgets):
    rng = random.Random(f"{triple}{budgets}")
    compared = 0
    for _ in range(10):
        compared += run_case(rng, triple, budgets=budgets, steps=triple[1] % 20 + 8)
    assert compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("triple", GRID, ids=str)
def test_random_against_reference_long(triple):
    rng = random.Random(f"long {triple}")
    for _ in range(40):
        run_case(rng, triple, budgets=True, steps=60)


def test_seed_decides_the_draws():
    make = lambda seed: _core_testing.Lookahead(7, 5, 1, prompt=list(range(50)), seed=seed)  # noqa: E731
    a, b, c = make(1), make(1), make(2)
    assert a.window[:, 0].tolist() == b.window[:, 0].tolist()
    assert a.window[:, 0].tolist() != c.window[:, 0].tolist()


def test_a_nan_row_does_not_put_an_invalid_id_into_the_window():
    state = _core_testing.Lookahead(4, 4, 2, prompt=list(range(20)), seed=5)
    for _ in range(8):
        tokens, parents, origin = state.draft(3)
        sampled = [-1 if o & ref.WINDOW else 30 + i for i, o in enumerate(origin.tolist())]
        state.update(sampled, [sampled[0]])
        for row, filled in zip(state.window, state.fill, strict=True):
            assert (row[:filled] >= 0).all()
        tokens, parents, _ = state.draft(3)
        assert (tokens >= 0).all()
        _core_testing.validate_tree(tokens, parents)


# ---- equality: whatever the window and the pool hold, output is plain decoding


def next_token(history: list[int], vocab: int, order: int) -> int:
    """A target that depends on the last `order` tokens (0: on all of them) through a hash."""
    h = 1469598103934665603
    for token in history[-order:] if order else history:
        h = ((h ^ (token + 1)) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return (h >> 33) % vocab


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("triple", [(1, 1, 0), (2, 2, 1), (4, 3, 4), (3, 5, 2), (7, 7, 7)], ids=str)
def test_output_is_plain_decoding(triple, order):
    rng = random.Random(f"{triple}{order}")
    for case in range(12):
        vocab = rng.choice([2, 4, 30])
        prompt = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 9, 30]))]
        plain = list(prompt)
        while len(plain) < len(prompt) + 80:
            plain.append(next_token(plain, vocab, order))
        state = _core_testing.Lookahead(*triple, prompt=prompt, seed=case, pool_grams=64)
        text = list(prompt)
        text.append(next_token(text, vocab, order))
        state.update([], text[-1:])
        steps = 0
        while len(text) < len(plain):
            tokens, parents, _ = state.draft(text[-1])
            sampled = []
            for node in range(len(tokens)):
                path = [int(tokens[i]) for i in _core_testing.tree_path(parents, node)]
                sampled.append(next_token(text + path, vocab, order))
            _, emitted, bad = _core_testing.accept_greedy(tokens, parents, sampled, triple[1] - 1)
            assert bad == -1
            state.update(sampled, emitted.tolist())
            text += emitted.tolist()
            steps += 1
        assert text[: len(plain)] == plain
        if order == 1 and triple[2] >= 2 and vocab == 4:
            assert steps < 60, "a periodic text must be decoded in fewer steps"


# ---- bounds


def test_pool_is_bounded_and_evicts_the_oldest():
    state = _core_testing.Lookahead(1, 3, 4, prompt=[0], pool_grams=16)
    assert state.pool_capacity == 16
    before = state.nbytes
    text = list(range(1, 200))
    for token in text:
        state.update([], [token])
    assert state.nbytes == before
    held = [key for key in range(200) if state.pool_entries(key)]
    assert held == list(range(182, 198)), "the newest 16 grams stay, one per key"


def test_bytes_of_a_smaller_triple_fit():
    limit = (7, 7, 7)
    room = _core_testing.lookahead_bytes(*limit, 1000)
    for w, n, g in product(range(1, 8), range(1, 8), range(8)):
        if valid(w, n, g):
            assert _core_testing.lookahead_bytes(w, n, g, 1000) <= room
