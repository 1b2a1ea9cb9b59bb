"""Prompt lookup: letters as tokens, words as expectations; then random text against the literal
pool of the external loop (V1) and against brute force. Exact."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reference import prompt_lookup_reference as ref
from specdec_ext import _core_testing


def ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], dtype=np.int32)


def draft(text: str, k: int = 4, m: int = 2, **options: bool) -> str:
    index = _core_testing.NgramIndex(max(1, len(text)), m)
    index.extend(ids(text))
    source, length, _ = index.lookup(ids(text), k, **options)
    return text[source : source + length]


@pytest.mark.parametrize(
    ("text", "k", "m", "expected"),
    [
        ("abcabd-ab", 1, 2, "c"),  # the oldest
        ("abcabdxyzab", 3, 2, "cab"),
        ("abcxab", 4, 2, "cxab"),  # exactly K tokens follow the first occurrence
        ("abcxabyab", 8, 2, "yab"),  # fewer than K follow the first: the most recent
        ("abcdeb", 4, 3, "cdeb"),  # only one letter matches
        ("abcd", 4, 3, ""),
        ("aa", 4, 2, "a"),
        ("aaa", 4, 2, "a"),
        ("aaaaaaaa", 4, 2, "aaaa"),
        ("a", 4, 2, ""),
        ("", 4, 2, ""),
        ("abab", 0, 2, ""),
        ("xbcaybcdabc", 3, 3, "ayb"),  # no "abc" before: "bc", the earliest
        ("xabcaybcdabc", 3, 3, "ayb"),  # "abc" itself
    ],
)
def test_words(text, k, m, expected):
    assert draft(text, k, m) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "c"),
        ({"use_oldest": False}, "d"),
        ({"keep_all": False}, "d"),
        ({"keep_all": False, "use_oldest": False}, "d"),
    ],
)
def test_occurrence_choice(options, expected):
    assert draft("abcabdab", 1, 2, **options) == expected


def test_longest_pattern_first():
    index = _core_testing.NgramIndex(32, 3)
    text = ids("bcX abcY bcZ abc")
    index.extend(text)
    source, length, match_len = index.lookup(text, 1)
    assert (chr(text[source]), length, match_len) == ("Y", 1, 3)


def texts(rng: random.Random, cases: int):
    for _ in range(cases):
        vocab = rng.choice([1, 2, 3, 4, 8, 50])
        yield [rng.randrange(vocab) for _ in range(rng.randint(1, 120))]


def check_grown(rng, text, k, m, keep_all, use_oldest, compare_v1: bool) -> int:
    """Grow the text by 1..6 tokens at a time, look up after each growth."""
    index = _core_testing.NgramIndex(len(text) + rng.choice([0, 1, 500]), m)
    v1 = ref.V1Pool(k, m, keep_all, use_oldest)
    n = drafts = 0
    while n < len(text):
        n = min(len(text), n + rng.randint(1, 6) if n else rng.randint(1, 40))
        part = text[:n]
        history = np.array(part, dtype=np.int32)
        index.extend(history)
        source, length, match_len = index.lookup(
            history, k, keep_all=keep_all, use_oldest=use_oldest
        )
        context = (part, k, m, keep_all, use_oldest)
        assert (source, length, match_len) == ref.lookup(part, k, m, keep_all, use_oldest), context
        if compare_v1:
            v1.update(part)
            assert part[source : source + length] == v1.query(part), context
        drafts += length
    return drafts


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("k", [1, 2, 4, 10])
def test_random_against_v1(k, m):
    rng = random.Random(f"{k} {m}")
    drafts = 0
    for text in texts(rng, 40):
        drafts += check_grown(rng, text, k, m, True, True, compare_v1=True)
        check_grown(rng, text, k, m, False, bool(rng.getrandbits(1)), compare_v1=True)
        check_grown(rng, text, k, m, True, False, compare_v1=False)
    assert drafts > 300


def test_v1_newest_keeps_a_repeated_continuation_at_its_old_place():
    """The one difference to V1, on purpose: its set does not move "c" to the end."""
    text = "abcabdabcab"
    v1 = ref.V1Pool(1, 2, True, use_oldest=False)
    v1.update([ord(c) for c in text])
    assert v1.query([ord(c) for c in text]) == [ord("d")]
    assert draft(text, 1, 2, use_oldest=False) == "c"


@pytest.mark.parametrize("vocab", [40, 5000, 100_000])
def test_large_history(vocab):
    """Many parts, full tables: every look-up of a 30,000 token text, against a dictionary."""
    rng = np.random.default_rng(vocab)
    n, m, k = 30_000, 3, 5
    text = rng.integers(0, vocab, n).astype(np.int32)
    for _ in range(60):  # copies of earlier text, so that long patterns match
        at, to = sorted(rng.integers(0, n - 200, 2))
        text[to : to + 150] = text[at : at + 150]
    index = _core_testing.NgramIndex(n, m)
    first: dict[tuple[int, ...], int] = {}
    last: dict[tuple[int, ...], int] = {}
    tokens = text.tolist()
    hits = 0
    for length in range(1, n + 1):
        if length > 1:
            for size in range(1, min(m, length - 1) + 1):
                pattern = tuple(tokens[length - 1 - size : length - 1])
                first.setdefault(pattern, length - 1)
                last[pattern] = length - 1
        if length % 3:
            continue
        history = text[:length]
        index.extend(history)
        expected = (0, 0, 0)
        for size in range(min(m, length - 1), 0, -1):
            pattern = tuple(tokens[length - size : length])
            if pattern in first:
                source = first[pattern] if length - first[pattern] >= k else last[pattern]
                expected = (source, min(k, length - source), size)
                hits += 1
                break
        assert index.lookup(history, k) == expected
    assert hits > 100


def token_hashes(count: int) -> np.ndarray:
    """The index's hash of every single token below `count`."""
    tokens = np.arange(count, dtype=np.uint64)
    h = (tokens ^ np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0x9FB21C651E98DF25)
    return h ^ (h >> np.uint64(29))


def test_equal_hashes_are_not_a_match():
    """Different tokens with the same tag on the same entry: found by birthday, never confused."""
    h = token_hashes(6_000_000)
    seen = (h >> np.uint64(24) & np.uint64(0xFFFFFFFF)) << np.uint64(8) | h & np.uint64(255)
    order = np.argsort(seen, kind="stable")
    twins = np.flatnonzero(seen[order][1:] == seen[order][:-1])
    assert len(twins) > 3
    for at in twins:
        a, b = int(order[at]), int(order[at + 1])
        text = np.array([a, 3, b, 4, b], np.int32)
        index = _core_testing.NgramIndex(128, 1)
        index.extend(text[:3])
        assert index.lookup(text[:3], 4) == (0, 0, 0)
        index.extend(text)
        assert index.lookup(text, 4) == (3, 2, 1)


def test_hash_flood_is_bounded():
    """Tokens that all fall on one entry: the work per token stays bounded; those that find no room
    are left out, the others are found, and no other token is ever taken for them."""
    h = token_hashes(400_000)
    tokens = np.arange(400_000)
    limit = 512  # 1024 entries in 4 parts of 256
    flood = tokens[((h & np.uint64(255)) == 7) & ((h >> np.uint64(59)) & np.uint64(3) == 1)]
    flood = flood[:200].astype(np.int32)
    assert len(flood) == 200
    found = 0
    text = np.concatenate([flood, flood])
    index = _core_testing.NgramIndex(limit, 1)
    for n in range(len(flood) + 1, len(text)):
        index.extend(text[:n])
        source, length, match_len = index.lookup(text[:n], 2)
        if length:
            found += 1
            assert match_len == 1 and text[source - 1] == text[n - 1]
    assert found == 128, "as many as one probe reaches"


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((0, 2), "max_seq_len = 0: use 1"),
        ((10, 0), "max_ngram = 0: use 1..16"),
        ((10, 17), "max_ngram = 17: use 1..16"),
    ],
)
def test_index_refused(args, match):
    with pytest.raises(ValueError, match=match):
        _core_testing.NgramIndex(*args)
    with pytest.raises(ValueError, match=match):
        _core_testing.NgramBatch(1, *args)


def test_misuse_refused():
    index = _core_testing.NgramIndex(4, 2)
    with pytest.raises(ValueError, match="history has 5 tokens, max_seq_len is 4"):
        index.extend(ids("abcde"))
    index.extend(ids("ab"))
    with pytest.raises(ValueError, match=r"2 were given to extend\(\)"):
        index.lookup(ids("abc"), 2)
    with pytest.raises(ValueError, match="a history only grows"):
        index.lookup(ids("a"), 2)
    with pytest.raises(ValueError, match="2 dimensions"):
        index.extend(np.zeros((2, 2), np.int32))


# ---- a batch of sequences in one call


def test_batch_equals_single():
    rng = np.random.default_rng(5)
    count, limit, k, m = 7, 200, 6, 3
    batch = _core_testing.NgramBatch(count, limit, m)
    texts = [[] for _ in range(count)]
    drafts = np.full((count, k), -9, np.int32)
    lengths = np.full(count, -9, np.int32)
    for step in range(40):
        if step == 20:
            batch.clear(3)
            texts[3] = []
        tokens = rng.integers(0, 3, (count, 5)).astype(np.int32)
        counts = rng.integers(0, 5, count).astype(np.int32)
        for b in range(count):
            texts[b] += tokens[b, : counts[b]].tolist()
        drafts[:] = -9
        batch.propose(tokens, counts, drafts, lengths)
        for b, text in enumerate(texts):
            source, length, _ = ref.lookup(text, k, m, True, True)
            assert lengths[b] == length
            assert drafts[b].tolist() == text[source : source + length] + [-9] * (k - length)


def test_batch_refuses_before_any_change():
    batch = _core_testing.NgramBatch(2, 4, 2)
    drafts, lengths = np.zeros((2, 3), np.int32), np.zeros(2, np.int32)
    tokens = np.ones((2, 5), np.int32)
    with pytest.raises(ValueError, match=r"counts\[1\] = 5: the history has 0 of max_seq_len = 4"):
        batch.propose(tokens, np.array([2, 5], np.int32), drafts, lengths)
    batch.propose(tokens, np.array([4, 4], np.int32), drafts, lengths)  # still empty: it fits
    with pytest.raises(ValueError, match=r"counts\[0\] = 6: tokens has 5 columns"):
        batch.propose(tokens, np.array([6, 0], np.int32), drafts, lengths)
    with pytest.raises(ValueError, match=r"counts\[0\] = -1"):
        batch.propose(tokens, np.array([-1, 0], np.int32), drafts, lengths)
    with pytest.raises(ValueError, match="with B = 2 sequences"):
        batch.propose(tokens[:1], np.array([1], np.int32), drafts, lengths)
    with pytest.raises(ValueError, match=r"sequence = 2: there are 0\.\.1"):
        batch.clear(2)
    with pytest.raises(ValueError, match="num_sequences = 0"):
        _core_testing.NgramBatch(0, 4, 2)


# ---- the pool shared by requests with one salt


def shared(**options: int):
    return _core_testing.SharedNgramPool(**{"capacity_tokens": 64, "max_ngram": 2, **options})


def ask(pool, salt: str, text: str, k: int = 4) -> str:
    tokens, _ = pool.lookup(salt, ids(text), k)
    return "".join(map(chr, tokens))


def test_shared_newest_wins_within_a_salt():
    pool = shared()
    pool.publish("s", ids("abcdef"))
    assert ask(pool, "s", "xxab") == "cdef"
    assert ask(pool, "s", "xxab", 2) == "cd"
    assert ask(pool, "other", "xxab") == ""
    pool.publish("s", ids("abxy"))
    assert ask(pool, "s", "xxab") == "xy"
    assert ask(pool, "s", "ef") == ""  # nothing follows
    assert ask(pool, "s", "zf") == ""  # a run never continues into the next one


def test_shared_pieces_of_one_text():
    """Piece by piece or at once: the same answers, and no more memory of the ring."""
    pool = shared(capacity_tokens=16)
    text = ids("abcdefghijklmn")
    for begin in range(0, 14, 2):
        pool.publish("s", text, begin, begin + 2)
    assert ask(pool, "s", "ab") == "cdef"
    assert ask(pool, "s", "bc", 20) == "defghijklmn"
    assert ask(pool, "s", "xn") == ""


def test_shared_pieces_of_texts_that_take_turns():
    """A piece that cannot go on with its run repeats what went before it."""
    pool = shared(capacity_tokens=4096, max_ngram=3)
    texts = [np.arange(1000 * i, 1000 * i + 200, dtype=np.int32) for i in range(1, 4)]
    for begin in range(0, 200, 10):
        for text in texts:
            pool.publish("s", text, begin, begin + 10)
    for text in texts:
        for n in range(1, 200):
            tokens, match_len = pool.lookup("s", text[:n], 6)
            assert match_len == min(n, 3)
            assert tokens.tolist() == text[n : n + len(tokens)].tolist()
            assert len(tokens) == min(6, 200 - n)


def test_shared_old_text_is_overwritten():
    pool = shared(capacity_tokens=16, max_ngram=3)
    pool.publish("s", ids("abcd"))
    bytes_before = pool.nbytes
    for i in range(100):
        pool.publish("s", ids("pqrs" + chr(200 + i)))
    assert ask(pool, "s", "ab") == ""
    assert ask(pool, "s", "pq") == "rs" + chr(299)
    assert pool.nbytes == bytes_before == pool.max_nbytes // 8
    pool.publish("s", np.arange(1000, 1100, dtype=np.int32))  # longer than the ring: its end stays
    tokens, match_len = pool.lookup("s", np.array([1095, 1096], np.int32), 9)
    assert tokens.tolist() == [1097, 1098, 1099] and match_len == 2
    assert pool.lookup("s", np.array([1050], np.int32), 9)[0].tolist() == []


def test_shared_salts_are_bounded_and_isolated():
    pool = shared(max_salts=2)
    pool.publish("a", ids("abcd"))
    pool.publish("b", ids("abxy"))
    assert ask(pool, "a", "ab") == "cd"  # uses "a": "b" is now the least recent
    pool.publish("c", ids("ab12"))
    assert pool.num_salts == 2 and pool.nbytes == pool.max_nbytes
    assert ask(pool, "b", "ab") == ""
    assert ask(pool, "a", "ab") == "cd" and ask(pool, "c", "ab") == "12"


def test_shared_random_against_scan():
    """Every draft is what the newest occurrence in a list of recent runs says."""
    rng = random.Random(11)
    for _ in range(60):
        m = rng.choice([1, 2, 3])
        pool = _core_testing.SharedNgramPool(capacity_tokens=4096, max_ngram=m)
        runs: list[list[int]] = []
        for _ in range(30):
            run = [rng.randrange(6) for _ in range(rng.randint(1, 20))]
            runs.append(run)
            pool.publish("s", np.array(run, np.int32))
            query = [rng.randrange(6) for _ in range(rng.randint(1, 5))]
            expected: list[int] = []
            matched = 0
            for size in range(min(m, len(query)), 0, -1):
                for past in reversed(runs):
                    places = [
                        p
                        for p in range(len(past) - size)
                        if past[p : p + size] == query[len(query) - size :]
                    ]
                    if places:
                        expected = past[places[-1] + size :][:5]
                        matched = size
                        break
                if matched:
                    break
            tokens, match_len = pool.lookup("s", np.array(query, np.int32), 5)
            assert (tokens.tolist(), match_len) == (expected, matched)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_ngram": 0}, "max_ngram = 0"),
        ({"capacity_tokens": 5}, r"capacity_tokens = 5: a ring holds at least"),
        ({"max_salts": 0}, "max_salts = 0"),
    ],
)
def test_shared_refused(options, match):
    with pytest.raises(ValueError, match=match):
        shared(**options)


def test_shared_publish_refuses():
    pool = shared()
    with pytest.raises(ValueError, match=r"text\[3:2\]: text has 2 tokens"):
        pool.publish("s", ids("ab"), 3)
    with pytest.raises(ValueError, match=r"text\[1\] = -1"):
        pool.publish("s", np.array([1, -1], np.int32))
    with pytest.raises(ValueError, match=r"max_draft_len = 128: use 0\.\.127"):
        pool.lookup("s", ids("ab"), 128)
