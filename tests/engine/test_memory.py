"""Memory is bounded and comes back: pages, pools, histories, the process itself."""

from __future__ import annotations

import gc
import random
from typing import Any

import psutil
import pytest
from driver import Engine, Job, hash_engine
from test_equality_synthetic import make_prompt

from hash_target import HashFunction

METHODS: dict[str, dict[str, Any]] = {
    "lookahead": {"method": "lookahead", "lookahead": (7, 7, 7)},
    "ngram": {"method": "ngram", "ngram": {"max_draft_len": 10, "max_matching_ngram_size": 3}},
    "ngram-public": {
        "method": "ngram",
        "ngram": {"max_draft_len": 10, "max_matching_ngram_size": 3, "is_public_pool": True},
    },
}


def serve(engine: Engine, rng: random.Random, count: int) -> None:
    """Serves `count` requests one after another; each must give back all it held."""
    function = engine.model.function
    for _ in range(count):
        prompt = make_prompt(rng, function.vocab)
        engine.run([Job(prompt, rng.randint(1, 24), {"cache_salt": str(rng.randrange(5))})])


@pytest.mark.parametrize("method", METHODS)
def test_a_thousand_sequential_requests_leave_it_flat(method: str) -> None:
    """RSS after 1,000 requests is RSS after 200, within 4 MiB; pools of requests are gone."""
    function = HashFunction(vocab=64, surprise=10)
    engine = hash_engine(
        function, page_size=4, max_batch_size=4, max_seq_len=128, **METHODS[method]
    )
    rng = random.Random(method)
    process = psutil.Process()
    serve(engine, rng, 200)
    gc.collect()
    before, pools = process.memory_info().rss, engine.ex.stats()["pool_bytes"]
    serve(engine, rng, 800)
    gc.collect()
    grown = process.memory_info().rss - before
    assert grown < 4 << 20, f"RSS grew by {grown} bytes over 800 requests"
    stats = engine.ex.stats()
    assert stats["finished"] == 1000
    if method == "ngram-public":
        # One ring per salt, made at its full size: it does not grow with what passes through.
        assert stats["pool_bytes"] == pools > 0
    else:
        assert stats["pool_bytes"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_pool_bytes_are_reported_and_bounded(method: str) -> None:
    """A running request's pool is counted, and grows at most linearly with its length."""
    function = HashFunction(vocab=5000, surprise=1)
    peaks = []
    for length in (100, 800):
        engine = hash_engine(function, max_batch_size=1, max_seq_len=1000, **METHODS[method])
        engine.ex.submit([1, 2, 3], max_tokens=length)
        peak = 0
        while engine.ex.num_unfinished:
            peak = max(peak, engine.ex.stats()["pool_bytes"])
            engine.step()
        peaks.append(peak)
    assert peaks[0] > 0
    # Lookahead (7,7,7) inserts at most 7 grams of 6 tokens per step, prompt lookup one entry per
    # token and n-gram size: below 1 KiB per token, in tables that double.
    assert peaks[1] - peaks[0] < 2 * 700 * 1024


def test_public_pools_are_bounded_in_salts() -> None:
    """The salt that was used least recently gives way: a thousand salts cost as much as some."""
    function = HashFunction(vocab=64, surprise=10)
    engine = hash_engine(function, max_batch_size=1, max_seq_len=128, **METHODS["ngram-public"])
    sizes = []
    for i in range(100):
        engine.run([Job([1, 2, 3], 8, {"cache_salt": f"tenant-{i}"})])
        sizes.append(engine.ex.stats()["pool_bytes"])
    assert sizes[-1] == sizes[49] == max(sizes)
    assert max(sizes) < 256 << 20


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("method", METHODS)
def test_rejected_drafts_give_their_pages_back(method: str, page_size: int) -> None:
    """After every step the pages held are those of the decided tokens, not one more."""
    function = HashFunction(vocab=64, surprise=8)
    options = METHODS[method] | {"adaptive": False}
    engine = hash_engine(
        function, page_size=page_size, max_batch_size=3, max_seq_len=128, **options
    )
    ids = [engine.ex.submit([i, 5, i, 5, i], max_tokens=60) for i in range(3)]
    drafted = 0
    while engine.ex.num_unfinished:
        outputs = engine.step() or []
        drafted += sum(out.num_drafts for out in outputs)
        ids = [rid for rid in ids if engine.ex.decoding(rid)]
        held = sum(-(-(len(engine.ex.history(rid)) - 1) // page_size) for rid in ids)
        assert engine.ex.stats()["free_pages"] == engine.num_pages - held
    assert drafted > 100


def test_stats_count_what_is_held() -> None:
    function = HashFunction()
    engine = hash_engine(function, page_size=4, max_batch_size=2, max_seq_len=128, method="none")
    for i in range(3):
        engine.ex.submit([i, i], max_tokens=20)
    engine.step()
    stats = engine.ex.stats()
    assert (stats["running"], stats["waiting"]) == (2, 1)
    assert stats["history_bytes"] > 0
    assert stats["free_pages"] == stats["total_pages"] - 2
    assert stats["plan_bytes"] > 0
    while engine.ex.num_unfinished:
        engine.step()
    engine.assert_idle()
    stats = engine.ex.stats()
    assert stats["generated_tokens"] == 60
    assert stats["finished"] == 3
    # Every token but a request's first is fed once; prompts are fed once.
    assert stats["rows"] == 3 * 2 + 3 * 19
    assert stats["prefill_rows"] == 6
