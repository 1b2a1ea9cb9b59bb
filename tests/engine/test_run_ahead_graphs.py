"""Steps as graphs: which bucket, that padding is inert, that replayed steps say the same.

Capturing itself needs a GPU; here a recorder runs the recorded operations over the same buffers.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from run_ahead_driver import FakeRecorder, run_ahead_hash_engine
from test_run_ahead import METHODS, expected, random_jobs

from hash_target import HashFunction
from specdec_ext.engine.overlap import Bucket, choose_bucket, make_buckets
from specdec_ext.engine.overlap.graphs import MAX_BUCKETS


@pytest.mark.parametrize(
    ("requests", "rows", "most"),
    [(1, 1, 64), (1, 16, 16), (5, 16, 64), (8, 84, 1024), (32, 5, 1024), (300, 16, 4096),
     (1024, 128, 8192), (1024, 1, 1024)],
)  # fmt: skip
def test_every_step_finds_the_cheapest_bucket(requests: int, rows: int, most: int) -> None:
    buckets = make_buckets(requests, rows, most)
    assert len(buckets) == len(set(buckets)) <= MAX_BUCKETS
    assert list(buckets) == sorted(buckets)
    rng = random.Random(requests)
    for _ in range(300):
        n = rng.randint(1, requests)
        step_rows = rng.randint(min(n, most), min(n * rows, most))
        chosen = choose_bucket(buckets, n, step_rows)
        assert chosen is not None
        assert chosen.requests >= n and chosen.rows >= step_rows
        for other in buckets:
            if other.requests >= n and other.rows >= step_rows:
                assert (chosen.rows, chosen.requests) <= (other.rows, other.requests)
    assert choose_bucket(buckets, requests + 1, 1) is None
    assert choose_bucket(buckets, 1, most + 1) is None
    assert all(b.rows <= most and b.requests <= requests for b in buckets)


def test_one_request_alone_is_not_padded_with_others() -> None:
    buckets = make_buckets(8, 16, 128)
    assert choose_bucket(buckets, 1, 16) == Bucket(16, 1)
    assert choose_bucket(buckets, 1, 1) == Bucket(1, 1)
    assert choose_bucket(buckets, 3, 30) == Bucket(32, 4)


def run(seed: int, depth: int, method: str, recorder: FakeRecorder | None) -> dict[str, Any]:
    rng = random.Random(seed)
    function = HashFunction(vocab=30, surprise=rng.choice([8, 30]), alphabet=4, seed=seed)
    engine = run_ahead_hash_engine(
        function,
        page_size=rng.choice([2, 16]),
        max_batch_size=rng.choice([1, 3, 6]),
        max_seq_len=200,
        max_num_tokens=rng.choice([7, 60, 300]),
        depth=depth,
        stub=seed if seed % 3 else None,
        recorder=recorder,
        **METHODS[method],
    )
    if recorder is not None and seed % 2:
        engine.pipeline.record_graphs()
        assert recorder.recorded == 2 * len(engine.pipeline.buckets)  # greedy, sampled
        engine.stream.record().wait()
        assert recorder.replayed == recorder.recorded  # once each, of nobody
        recorder.replayed = 0
    jobs = random_jobs(rng, function, method, 7, 200)
    for job, got in zip(jobs, engine.run(jobs), strict=True):
        text, reason = expected(function, job)
        if got.cancelled:
            assert got.tokens == text[: len(got.tokens)]
        else:
            assert (got.tokens, got.finish_reason) == (text, reason)
    return engine.stats()


@pytest.mark.parametrize("method", METHODS)
def test_replayed_steps_say_the_same(method: str) -> None:
    replayed = 0
    for seed in range(9):
        recorder = FakeRecorder()
        stats = run(seed, seed % 3, method, recorder)
        replayed += recorder.replayed
        assert recorder.replayed <= stats["steps"]
        without = run(seed, seed % 3, method, None)
        assert stats["generated_tokens"] == without["generated_tokens"] or stats["cancelled"]
        assert stats["steps"] >= recorder.replayed
    assert replayed > 150


def test_steps_with_prompts_run_without_a_graph() -> None:
    function = HashFunction(vocab=30, seed=1)
    recorder = FakeRecorder()
    engine = run_ahead_hash_engine(
        function, max_batch_size=2, max_seq_len=100, max_num_tokens=50, depth=0, recorder=recorder
    )
    engine.submit([1] * 90, max_tokens=1)
    engine.drain()
    assert engine.stats()["steps"] == 2 and recorder.replayed == 0
    engine.submit([1] * 40, max_tokens=5)
    engine.drain()
    assert recorder.replayed == 4
    assert recorder.recorded == 1


def test_recording_changes_nothing_of_the_step_that_needs_it() -> None:
    """The first step of a bucket records it: a step of nobody runs in between."""
    function = HashFunction(vocab=30, seed=1)
    recorder = FakeRecorder()
    engine = run_ahead_hash_engine(
        function, max_batch_size=4, max_seq_len=100, max_num_tokens=90, depth=1, stub=5,
        recorder=recorder, **METHODS["lookahead"],
    )  # fmt: skip
    rid = engine.submit([1, 2, 3], max_tokens=60)
    outputs = [out for _ in range(6) for out in engine.step() or []]
    engine.submit([4, 5], max_tokens=9)  # another bucket, while a step is in flight
    outputs += engine.drain()
    tokens = [t for out in outputs if out.request_id == rid for t in out.tokens]
    assert tokens == function.reference([1, 2, 3], 60)
    assert 1 < recorder.recorded < recorder.replayed
