"""Prefix reuse: a warm request equals a cold one, whoever filled the cache and whatever drafts.

The hash target reads its whole history from the pages, so one published page with wrong, foreign or
half-written K/V changes a token. The expectation is a function of the prompt alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from driver import Delivery, Engine, Job, hash_engine, model_engine

from hash_target import HashFunction

METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "lookahead": {"method": "lookahead", "lookahead": (4, 3, 4), "adaptive": False},
    "lookahead adaptive": {"method": "lookahead", "lookahead": (7, 7, 7)},
    "ngram": {
        "method": "ngram",
        "ngram": {"max_draft_len": 10, "max_matching_ngram_size": 2},
        "adaptive": False,
    },
    "ngram public": {
        "method": "ngram",
        "ngram": {"max_draft_len": 5, "max_matching_ngram_size": 3, "is_public_pool": True},
    },
    "proposed": {"method": "proposed", "proposed_max_draft_len": 7},
}
FUNCTION = HashFunction(vocab=40, surprise=9)


def reuse_engine(method: str = "none", **options: Any) -> Engine:
    return hash_engine(FUNCTION, enable_block_reuse=True, **METHODS[method], **options)


def expected(job: Job) -> list[int]:
    return FUNCTION.reference(job.prompt, job.max_tokens)


class Family:
    """Prompts that share starts: system texts, turns of conversations, plain repetitions."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.starts = [[rng.randrange(40) for _ in range(rng.randint(20, 70))] for _ in range(4)]
        self.turns: list[list[int]] = []

    def prompt(self) -> list[int]:
        rng = self.rng
        own = [rng.randrange(40) for _ in range(rng.randint(0, 12))]
        if self.turns and rng.random() < 0.4:
            return rng.choice(self.turns)[:130] + own
        start = rng.choice(self.starts)
        return start[: rng.randint(1, len(start))] + own if rng.random() < 0.5 else start + own

    def ended(self, job: Job, delivery: Delivery) -> None:
        self.turns.append(job.prompt + delivery.tokens)
        del self.turns[:-20]


def propose_right_and_wrong(engine: Engine, rng: random.Random, ids: list[int]) -> None:
    """Drafts as trees: a branch of right tokens, with wrong ones beside and before it."""
    for rid in ids:
        if not engine.ex.decoding(rid):
            continue
        history = engine.ex.history(rid)
        right = FUNCTION.reference(history, 3)
        wrong = [rng.randrange(40), rng.randrange(40)]
        engine.ex.propose(rid, [*wrong, *right], [-1, 0, -1, 2, 3])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("method", METHODS)
def test_warm_equals_cold(method: str, page_size: int) -> None:
    """Waves of requests with shared starts; each wave finds what earlier ones published."""
    rng = random.Random(f"{method} {page_size}")
    family = Family(rng)
    engine = reuse_engine(method, page_size=page_size, max_batch_size=6, max_num_tokens=120)
    accepted = 0
    for _ in range(12):
        jobs = []
        for i in range(8):
            options: dict[str, Any] = {"cache_salt": rng.choice(["", "", "b"])}
            if method.startswith("lookahead"):
                options["seed"] = rng.randrange(1000)
            cancel = rng.randint(1, 12) if i % 5 == 4 else None
            jobs.append(
                Job(family.prompt(), rng.randint(1, 40), options, rng.randint(0, 6), cancel)
            )
        if method == "proposed":
            deliveries = run_with_proposals(engine, rng, jobs)
        else:
            deliveries = engine.run(jobs)
        for job, got in zip(jobs, deliveries, strict=True):
            want = expected(job)
            assert got.tokens == want[: len(got.tokens)]
            if not got.cancelled:
                assert got.tokens == want
                family.ended(job, got)
            accepted += got.num_accepted
    stats = engine.ex.stats()
    assert stats["reuse_hits"] > 30
    assert stats["cached_tokens"] > 1000
    assert accepted > 20 or method == "none"


def run_with_proposals(engine: Engine, rng: random.Random, jobs: list[Job]) -> list[Delivery]:
    deliveries = [Delivery() for _ in jobs]
    ids = {
        engine.ex.submit(job.prompt, max_tokens=job.max_tokens, **job.options): i
        for i, job in enumerate(jobs)
    }
    while engine.ex.num_unfinished:
        alive = [r for r, i in ids.items() if deliveries[i].finish_reason is None]
        propose_right_and_wrong(engine, rng, alive)
        for out in engine.step() or []:
            engine.record(deliveries[ids[out.request_id]], out)
    engine.assert_idle()
    return deliveries


@pytest.mark.parametrize("method", METHODS)
def test_under_pressure_pages_give_way(method: str) -> None:
    """A pool that holds little more than one request: everything cached is evicted again."""
    rng = random.Random(method)
    family = Family(rng)
    engine = reuse_engine(method, page_size=4, num_pages=96, max_batch_size=4, max_seq_len=220)
    for _ in range(25):
        jobs = [Job(family.prompt(), rng.randint(1, 60), {}, rng.randint(0, 9)) for _ in range(4)]
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            assert got.tokens == expected(job)
            family.ended(job, got)
    stats = engine.ex.stats()
    assert stats["evicted_pages"] > 100
    assert stats["reuse_hits"] > 10
    assert stats["published_pages"] - stats["evicted_pages"] == stats["cached_pages"]


def cached_tokens(engine: Engine, prompt: list[int], max_tokens: int = 1, **options: Any) -> int:
    """num_cached_tokens of one request; its output must be right."""
    rid = engine.ex.submit(prompt, max_tokens=max_tokens, **options)
    tokens, cached = [], None
    while engine.ex.num_unfinished:
        for out in engine.step() or []:
            assert out.request_id == rid
            tokens += out.tokens
            cached = out.num_cached_tokens
    assert tokens == FUNCTION.reference(prompt, max_tokens)
    assert cached is not None
    return int(cached)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 40])
def test_the_last_prompt_token_is_always_computed(length: int) -> None:
    engine = reuse_engine(page_size=8)
    prompt = [i % 40 for i in range(length)]
    assert cached_tokens(engine, prompt) == 0
    assert cached_tokens(engine, prompt) == (length - 1) // 8 * 8
    rows = engine.ex.stats()["rows"]
    assert cached_tokens(engine, prompt) == (length - 1) // 8 * 8
    assert engine.ex.stats()["rows"] - rows == length - (length - 1) // 8 * 8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_tokens", [1, 20, 61])
def test_the_next_turn_finds_all_that_was_said(method: str, max_tokens: int) -> None:
    """The K/V of prompt and answer is there, up to the last full block; drafts are not."""
    engine = reuse_engine(method, page_size=4)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4]
    cached_tokens(engine, prompt, max_tokens)
    said = prompt + FUNCTION.reference(prompt, max_tokens)
    # The last token was never fed.
    assert cached_tokens(engine, [*said, 5, 6, 7, 8, 9]) == (len(said) - 1) // 4 * 4
    published = engine.ex.stats()["published_pages"]
    assert published == (len(said) + 5) // 4, "drafts were published"


def test_a_stop_token_ends_what_is_published() -> None:
    """Drafts accepted beyond a stop token are not part of the text, nor of the cache."""
    engine = reuse_engine("ngram", page_size=1)
    prompt = [7, 8, 9] * 8
    text = FUNCTION.reference(prompt, 40)
    stop = text[25]
    end = text.index(stop) + 1
    rid = engine.ex.submit(prompt, max_tokens=40, stop_token_ids=[stop])
    tokens: list[int] = []
    while engine.ex.num_unfinished:
        for out in engine.step() or []:
            assert out.request_id == rid
            tokens += out.tokens
    assert tokens == text[:end]
    assert engine.ex.stats()["published_pages"] == len(prompt) + end - 1


def test_a_request_may_ask_for_every_row() -> None:
    """Nothing is taken over (scores of the whole prompt need all rows), all of it is published."""
    engine = reuse_engine(page_size=4)
    prompt = [i * 7 % 40 for i in range(30)]
    assert cached_tokens(engine, prompt, compute_whole_prompt=True) == 0
    assert cached_tokens(engine, prompt) == 28
    rows = engine.ex.stats()["prefill_rows"]
    assert cached_tokens(engine, prompt, compute_whole_prompt=True) == 0
    assert engine.ex.stats()["prefill_rows"] - rows == 30
    stats = engine.ex.stats()
    assert stats["deduplicated_pages"] == 7  # its own copies are given up again


def test_salts_share_nothing() -> None:
    engine = reuse_engine(page_size=4)
    secret = [i * 7 % 40 for i in range(30)]
    assert cached_tokens(engine, secret, cache_salt="a") == 0
    assert cached_tokens(engine, secret, cache_salt="b") == 0
    assert cached_tokens(engine, secret) == 0
    assert cached_tokens(engine, secret, cache_salt="a") == 28
    assert cached_tokens(engine, secret, cache_salt="a ") == 0


def test_outputs_of_one_prompt_compute_it_once() -> None:
    """Requests that start together wait one step for the first of them."""
    engine = reuse_engine(page_size=4, max_batch_size=8, max_num_tokens=512)
    prompt = [i * 3 % 40 for i in range(41)]
    jobs = [Job(prompt, 5) for _ in range(8)]
    for got in engine.run(jobs):
        assert got.tokens == FUNCTION.reference(prompt, 5)
    stats = engine.ex.stats()
    assert stats["prefill_rows"] == 41 + 7
    assert stats["cached_tokens"] == 7 * 40
    # Nobody's first token is more than one step late.
    assert stats["steps"] == 1 + 5


def test_shared_pages_are_counted_once_by_admission() -> None:
    """Eight requests of 11 pages each run together in 40 pages: ten of them are shared."""
    engine = reuse_engine(page_size=4, num_pages=40, max_batch_size=8, max_seq_len=64)
    prompt = [i * 3 % 40 for i in range(41)]
    cached_tokens(engine, prompt)
    ids = [engine.ex.submit(prompt, max_tokens=4) for _ in range(8)]
    engine.step()
    stats = engine.ex.stats()
    assert stats["running"] == len(ids)
    assert stats["promised_pages"] <= 40
    while engine.ex.num_unfinished:
        engine.step()
    engine.assert_idle()


def test_a_long_prompt_is_published_when_it_has_been_read() -> None:
    """Chunks of an unfinished prompt are not visible: they may still fail."""
    engine = reuse_engine(page_size=4, max_num_tokens=16, max_batch_size=2)
    prompt = [i * 3 % 40 for i in range(50)]
    engine.ex.submit(prompt, max_tokens=1)
    for _ in range(3):
        engine.step()
        assert engine.ex.stats()["published_pages"] == 0
    engine.step()
    assert engine.ex.stats()["published_pages"] == 12


def test_what_fails_or_is_cancelled_publishes_nothing_new() -> None:
    engine = reuse_engine(page_size=2)
    prompt = [i * 3 % 40 for i in range(20)]
    engine.ex.submit(prompt, max_tokens=5)
    plan = engine.ex.plan()
    engine.ex.fail(plan, "injected")
    assert engine.ex.stats()["published_pages"] == 0
    rid = engine.ex.submit(prompt, max_tokens=5)
    engine.step(lambda _: engine.ex.cancel(rid))
    assert engine.ex.stats()["published_pages"] == 0
    engine.assert_idle()
    assert cached_tokens(engine, prompt) == 0


def test_scores_with_a_nan_are_not_published() -> None:
    """The request ends with an error, and nobody meets its K/V again."""
    engine = reuse_engine(page_size=2)
    prompt = [i * 3 % 40 for i in range(20)]
    engine.ex.submit(prompt, max_tokens=5)
    plan = engine.ex.plan()
    engine.model.forward(plan)
    (out,) = engine.ex.commit(plan, torch.full((1,), -1, dtype=torch.int32))
    assert out.finish_reason == "error"
    assert engine.ex.stats()["published_pages"] == 0
    assert cached_tokens(engine, prompt) == 0


def test_cancels_leave_survivors_alone() -> None:
    """A storm of cancels at every stage, half of them in flight, on shared starts."""
    rng = random.Random(3)
    family = Family(rng)
    engine = reuse_engine("ngram", page_size=4, num_pages=150, max_batch_size=6, max_num_tokens=60)
    alive: dict[int, tuple[Job, list[int]]] = {}
    ended = cancelled = 0
    while ended < 150:
        while len(alive) < 8:
            job = Job(family.prompt(), rng.randint(1, 30))
            rid = engine.ex.submit(job.prompt, max_tokens=job.max_tokens)
            alive[rid] = (job, [])

        def strike(_: Any) -> None:
            nonlocal cancelled
            if alive and rng.random() < 0.15:
                victim = rng.choice(list(alive))
                assert engine.ex.cancel(victim)
                del alive[victim]
                cancelled += 1

        strike(None)
        for out in engine.step(strike) or []:
            job, tokens = alive[out.request_id]
            tokens += out.tokens
            if out.finish_reason is not None:
                assert tokens == expected(job)
                del alive[out.request_id]
                ended += 1
    assert cancelled > 50
    for rid in alive:
        engine.ex.cancel(rid)
    engine.assert_idle()


def test_reset_forgets_what_nobody_uses() -> None:
    engine = reuse_engine(page_size=4)
    prompt = [i * 3 % 40 for i in range(21)]
    cached_tokens(engine, prompt)
    engine.model.k_pages.fill_(float("nan"))
    assert engine.ex.reset_prefix_cache() == 5
    assert engine.ex.reset_prefix_cache() == 0
    assert cached_tokens(engine, prompt) == 0
    engine.ex.submit(prompt, max_tokens=9)
    engine.step()
    assert engine.ex.reset_prefix_cache() == 0  # all in use
    while engine.ex.num_unfinished:
        engine.step()
    assert cached_tokens(engine, prompt) == 20


def test_many_salts_leave_memory_flat() -> None:
    """What is remembered of salts goes with their pages."""
    engine = reuse_engine(page_size=4, num_pages=60, max_batch_size=2, max_seq_len=100)
    sizes = []
    for i in range(400):
        cached_tokens(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9], cache_salt=f"tenant {i}")
        sizes.append(engine.ex.stats()["index_bytes"])
    assert sizes[-1] == sizes[100] == max(sizes)


@pytest.mark.parametrize(
    "family", ["llama", "mistral_window", "qwen2_window", "gemma3", "gpt_neox"]
)
def test_bits_of_a_real_model(family: str, tmp_path: Any) -> None:
    """Log-probabilities after a warm start are those after a cold one, bit for bit.

    Sliding windows included: pages hold every position, a window is only a mask over them.
    """
    from model.model_zoo import VOCAB, make_model, save_model
    from specdec_ext.models import load_model

    save_model(make_model(family), tmp_path)
    model = load_model(tmp_path, dtype="float32", max_rows=64)
    assert model.numerics == "exact"
    rng = random.Random(family)
    start = [rng.randrange(3, VOCAB) for _ in range(70)]
    tails = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 14, 33)]
    jobs = [Job(start + tail, 20, {"logprobs": 5}) for tail in tails]
    jobs.append(Job(start[:50] + tails[2], 20, {"logprobs": 5}))
    results = []
    for options in (
        {},
        {"enable_block_reuse": True},
        {"enable_block_reuse": True, "method": "lookahead", "lookahead": (4, 3, 4)},
    ):
        engine = model_engine(
            model, page_size=8, max_batch_size=3, max_seq_len=180, max_num_tokens=64, **options
        )
        cold = engine.run(jobs)
        warm = engine.run(jobs)
        results += [[(d.tokens, d.logprobs) for d in run] for run in (cold, warm)]
        hits = engine.ex.stats()["reuse_hits"]
        assert hits >= 2 * len(jobs) - 3 if options else hits == 0
    for result in results[1:]:
        assert result == results[0]
