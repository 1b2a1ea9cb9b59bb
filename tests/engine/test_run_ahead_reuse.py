"""Prefix reuse in steps that run ahead: text stays and pages come back."""

from __future__ import annotations

import random
from typing import Any

import pytest
from driver import Job
from engine_loop_cases import FUNCTION
from run_ahead_driver import RunAheadEngine, random_hash_engine, run_ahead_hash_engine
from test_run_ahead import METHODS, expected, random_jobs

DEPTHS = [0, 1, 2]


def idle(engine: RunAheadEngine) -> None:
    """Published pages count as free; forgotten, none is left."""
    engine.assert_idle()
    stats = engine.stats()
    assert engine.executor.reset_prefix_cache() == stats["cached_pages"]
    assert engine.stats()["cached_pages"] == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_random_schedules_over_shared_prefixes(depth: int, method: str) -> None:
    """Prompts with equal starts under two salts, few pages, cancels."""
    hits = tokens = evicted = 0
    for seed in range(500, 512):
        rng = random.Random(seed)
        function, engine = random_hash_engine(
            rng, seed, depth, enable_block_reuse=True, **METHODS[method]
        )
        starts = [[rng.randrange(30) for _ in range(60)] for _ in range(2)]
        jobs = random_jobs(rng, function, method, 12, 200)
        for job in jobs:
            if rng.random() < 0.8:
                start = rng.choice(starts)[: rng.choice([5, 16, 33, 60])]
                job.prompt = start + job.prompt[: rng.choice([1, 9])]
                job.max_tokens = min(job.max_tokens, 200 - len(job.prompt))
            if rng.random() < 0.3:
                job.options["cache_salt"] = "mine"
            if rng.random() < 0.2:
                job.options["logprobs"] = 0
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            text, reason = expected(function, job)
            tokens += len(got.tokens)
            assert got.tokens == (text[: len(got.tokens)] if got.cancelled else text)
            assert got.cancelled or got.finish_reason == reason
        stats = engine.stats()
        hits += stats["reuse_hits"]
        evicted += stats["evicted_pages"]
        idle(engine)
    assert hits > 20 and tokens > 1500 and evicted > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_second_request_computes_what_is_new(depth: int) -> None:
    engine = run_ahead_hash_engine(
        FUNCTION, page_size=4, max_batch_size=2, max_seq_len=200, max_num_tokens=100, depth=depth,
        enable_block_reuse=True, **METHODS["lookahead"],
    )  # fmt: skip
    prompt = list(range(30))
    [first] = engine.run([Job(prompt, 20)])
    rows = engine.stats()["prefill_rows"]
    # All that was read before the last step's tokens is there, the answer too.
    longer = prompt + first.tokens[:12] + [7, 7]
    [second] = engine.run([Job(longer, 20)])
    assert second.tokens == FUNCTION.reference(longer, 20)
    stats = engine.stats()
    assert (rows, stats["reuse_hits"]) == (30, 1)
    assert stats["prefill_rows"] - rows == len(longer) - stats["cached_tokens"]
    assert stats["cached_tokens"] >= 36
    # Nobody shares across salts.
    [other] = engine.run([Job(longer, 20, {"cache_salt": "other"})])
    assert other.tokens == second.tokens
    assert engine.stats()["cached_tokens"] == stats["cached_tokens"]
    idle(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_equal_prompts_at_once_are_computed_once(depth: int) -> None:
    engine = run_ahead_hash_engine(
        FUNCTION, page_size=4, max_batch_size=4, max_seq_len=200, max_num_tokens=200, depth=depth,
        stub=3, enable_block_reuse=True, **METHODS["ngram"],
    )  # fmt: skip
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    for d in engine.run([Job(prompt, 30) for _ in range(4)]):
        assert d.tokens == FUNCTION.reference(prompt, 30)
    assert engine.stats()["prefill_rows"] == 13 + 3 * 1
    idle(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_a_stop_string_cut_off_is_never_published(depth: int) -> None:
    """The caller cancels when it reads the text: of that step nothing is there to be found."""
    engine = run_ahead_hash_engine(
        FUNCTION, page_size=1, max_batch_size=1, max_seq_len=200, max_num_tokens=200, depth=depth,
        enable_block_reuse=True, **METHODS["lookahead"],
    )  # fmt: skip
    prompt = [5, 6, 5, 6, 5, 6]
    rid = engine.submit(prompt, max_tokens=60)
    delivered: list[int] = []
    while len(delivered) < 20:
        last = 0
        for out in engine.step() or []:
            delivered += out.tokens
            last = len(out.tokens)
    assert engine.cancel(rid)
    engine.alive.discard(rid)
    engine.drain()
    stats: dict[str, Any] = engine.stats()
    assert stats["cached_pages"] == len(prompt) + len(delivered) - last
    idle(engine)
