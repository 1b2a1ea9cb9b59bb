"""Every drafter delivers exactly what plain decoding delivers, on targets that notice any slip.

The target (hash_target.py) hashes the whole history as it reads it from the pages, so a wrong slot,
page, mask bit or position changes a token. The expectation is a pure Python function of the prompt:
no executor takes part in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from driver import Delivery, Job, hash_engine

from hash_target import HashFunction

# Compared tokens per case; the last two tests of this file hold the sums against the promise.
QUICK: list[int] = []
SLOW: list[int] = []


@dataclass(frozen=True)
class Drafter:
    """A drafting configuration of the executor, and the request options that vary it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    variants: tuple[dict[str, Any], ...] = ({},)


def lookahead(w: int, n: int, g: int, *variants: dict[str, Any], adaptive: bool = False) -> Drafter:
    name = f"lookahead-{w}-{n}-{g}" + ("-adaptive" if adaptive else "")
    options = {"method": "lookahead", "lookahead": (w, n, g), "adaptive": adaptive}
    return Drafter(name, options, ({}, {"speculative": False}, *variants))


def ngram(length: int, size: int, *, adaptive: bool = False, **flags: bool) -> Drafter:
    name = "-".join(["ngram", str(length), str(size), *(k for k, v in flags.items() if v)])
    name += "-adaptive" if adaptive else ""
    config = {"max_draft_len": length, "max_matching_ngram_size": size, **flags}
    variants = ({}, {"speculative": False}, {"max_draft_len": 1}, {"adaptive": not adaptive})
    return Drafter(name, {"method": "ngram", "ngram": config, "adaptive": adaptive}, variants)


DRAFTERS = [
    Drafter("none", {"method": "none"}),
    lookahead(1, 1, 0),
    lookahead(2, 2, 1, {"lookahead": (1, 2, 1)}),
    lookahead(4, 3, 4, {"lookahead": (2, 3, 1)}, {"lookahead": (1, 1, 0)}),
    lookahead(3, 4, 0, {"lookahead": (3, 4, 0)}),
    lookahead(1, 5, 3),
    lookahead(7, 7, 7, {"lookahead": (4, 3, 4)}, {"adaptive": True}),
    lookahead(7, 7, 7, {"adaptive": False}, adaptive=True),
    ngram(4, 2),
    ngram(10, 2),
    ngram(10, 3, is_keep_all=False, is_use_oldest=False),
    ngram(7, 1, is_use_oldest=False),
    ngram(10, 2, adaptive=True),
    ngram(5, 3, is_public_pool=True),
    ngram(127, 4),
]
PAGES = [1, 2, 16, 64]


def make_prompt(rng: random.Random, vocab: int) -> list[int]:
    """A prompt of 1..60 tokens: a short motif repeated, random tokens, or both."""
    length = rng.choice([1, 2, 3, 5, 17, 33, 60])
    motif = [rng.randrange(vocab) for _ in range(rng.randint(1, 9))]
    if rng.random() < 0.4:
        return [rng.randrange(vocab) for _ in range(length)]
    return (motif * (length // len(motif) + 1))[:length]


def make_jobs(
    rng: random.Random, drafter: Drafter, count: int, vocab: int, steps: int
) -> list[Job]:
    """Requests with mixed options that join at random steps; some are cancelled underway."""
    jobs = []
    for i in range(count):
        options = dict(rng.choice(drafter.variants), seed=rng.randrange(1 << 30))
        if drafter.options.get("ngram", {}).get("is_public_pool"):
            options["cache_salt"] = rng.choice(["", "a"])
        submit_step = rng.randint(0, steps)
        cancel_step = submit_step + rng.randint(0, 20) if i % 7 == 3 else None
        jobs.append(
            Job(make_prompt(rng, vocab), rng.randint(1, 90), options, submit_step, cancel_step)
        )
    return jobs


def compare(function: HashFunction, jobs: list[Job], deliveries: list[Delivery]) -> int:
    """Asserts token-for-token equality with the definition; returns the number of tokens."""
    compared = 0
    for job, got in zip(jobs, deliveries, strict=True):
        expected = function.reference(job.prompt, job.max_tokens)
        if got.cancelled:
            expected = expected[: len(got.tokens)]
        else:
            assert got.finish_reason == "length", (job, got)
        assert got.tokens == expected, job
        compared += len(expected)
    return compared


def run_case(drafter: Drafter, page: int, batch: int, requests: int, seed: int) -> int:
    rng = random.Random(f"{drafter.name}-{page}-{batch}-{seed}")
    function = HashFunction(
        vocab=rng.choice([7, 64, 300]), surprise=rng.choice([1, 6, 25]), seed=rng.randrange(1000)
    )
    # Steps too small for every prompt and draft at once, so that prompts go in chunks.
    rows = max(batch, rng.choice([17, 64, 512]))
    engine = hash_engine(
        function,
        page_size=page,
        max_batch_size=batch,
        max_seq_len=160,
        max_num_tokens=rows,
        **drafter.options,
    )
    jobs = make_jobs(rng, drafter, requests, function.vocab, steps=40 if batch > 1 else 0)
    return compare(function, jobs, engine.run(jobs))


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.name)
def test_drafter_equals_definition(drafter: Drafter, batch: int) -> None:
    page = PAGES[(DRAFTERS.index(drafter) + batch) % len(PAGES)]
    QUICK.append(run_case(drafter, page, batch, requests=64, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.name)
def test_drafter_equals_definition_everywhere(drafter: Drafter, batch: int, page: int) -> None:
    SLOW.append(sum(run_case(drafter, page, batch, requests=64, seed=s) for s in range(1, 4)))


def test_long_histories_and_page_reuse() -> None:
    """A pool with no page to spare, requests longer than many pages, waiting requests."""
    function = HashFunction(vocab=40, surprise=9, seed=5)
    for options in (lookahead(4, 3, 4).options, ngram(10, 2).options):
        pages = -(-(260 + 16) // 8)
        engine = hash_engine(
            function, page_size=8, num_pages=2 * pages, max_batch_size=8, max_seq_len=260, **options
        )
        jobs = [Job([i % 40, (i * 7) % 40], 255) for i in range(6)]
        compare(function, jobs, engine.run(jobs))


def test_drafts_are_accepted_on_repetitive_targets() -> None:
    """The equality above would be empty if no draft were ever accepted."""
    function = HashFunction(vocab=64, surprise=25, seed=3)
    for drafter in (lookahead(4, 3, 4), lookahead(7, 7, 7), ngram(10, 2), ngram(4, 2)):
        engine = hash_engine(function, max_batch_size=3, **drafter.options)
        jobs = [Job([i, i + 1, i + 2], 120) for i in range(3)]
        deliveries = engine.run(jobs)
        compare(function, jobs, deliveries)
        forwards = sum(d.forwards for d in deliveries)
        tokens = sum(len(d.tokens) for d in deliveries)
        assert tokens / forwards > 1.5, drafter.name
        assert all(d.num_accepted > 0 for d in deliveries)


def test_one_one_zero_is_plain_decoding() -> None:
    """(1,1,0) drafts nothing: one row and one token per forward, as without a drafter."""
    function = HashFunction()
    engine = hash_engine(function, max_batch_size=1, **lookahead(1, 1, 0).options)
    (delivery,) = engine.run([Job([1, 2, 3], 30)])
    assert (delivery.forwards, delivery.num_drafts) == (30, 0)


def test_output_does_not_depend_on_the_seed_of_the_window() -> None:
    """Window contents are random by seed: they decide the speed only."""
    function = HashFunction(vocab=32, surprise=10, seed=8)
    expected = function.reference([4, 5, 6, 4, 5], 80)
    forwards = set()
    for seed in range(8):
        engine = hash_engine(function, max_batch_size=1, **lookahead(4, 4, 4).options)
        (delivery,) = engine.run([Job([4, 5, 6, 4, 5], 80, {"seed": seed})])
        assert delivery.tokens == expected
        forwards.add(delivery.forwards)
    engine = hash_engine(function, max_batch_size=1, **lookahead(4, 4, 4).options)
    again = [engine.run([Job([4, 5, 6, 4, 5], 80, {"seed": 3})])[0] for _ in range(2)]
    assert again[0].forwards == again[1].forwards, "same seed, same steps"


def test_private_pools_do_not_see_other_requests() -> None:
    """A request's steps are the same alone and beside a neighbour with the same text."""
    function = HashFunction(vocab=50, surprise=20, seed=2)
    alone = hash_engine(function, max_batch_size=2, **ngram(8, 2).options)
    (first,) = alone.run([Job([1, 2, 3], 60)])
    crowd = hash_engine(function, max_batch_size=2, **ngram(8, 2).options)
    head = function.reference([1, 2, 3], 60)
    _, second = crowd.run([Job([1, 2, 3, *head], 20), Job([1, 2, 3], 60, submit_step=3)])
    assert (second.tokens, second.forwards) == (first.tokens, first.forwards)
    assert (second.num_drafts, second.num_accepted) == (first.num_drafts, first.num_accepted)


def test_public_pools_are_shared_only_within_a_salt() -> None:
    """With a public pool the neighbour's text helps the same salt and never another one."""
    function = HashFunction(vocab=5000, surprise=1, seed=2)  # nothing repeats within a request
    head = function.reference([1, 2, 3], 60)
    forwards = {}
    for salt in ("a", "b"):
        engine = hash_engine(function, max_batch_size=2, **ngram(8, 2, is_public_pool=True).options)
        engine.run([Job([1, 2, 3, *head], 5, {"cache_salt": "a"})])
        (got,) = engine.run([Job([1, 2, 3], 60, {"cache_salt": salt})])
        assert got.tokens == head
        forwards[salt] = got.forwards
    assert forwards["a"] < 30
    assert forwards["b"] == 60


def require_total(counts: list[int], cases: int, least: int) -> None:
    if len(counts) < cases:
        pytest.skip(f"{len(counts)} of {cases} cases ran in this process")
    assert sum(counts) >= least, sum(counts)


def test_compared_tokens() -> None:
    """Runs after the cases above: together they compare more than 100,000 tokens."""
    require_total(QUICK, 3 * len(DRAFTERS), 100_000)


@pytest.mark.slow
def test_compared_tokens_everywhere() -> None:
    """The slow suite compares more than a million tokens."""
    require_total(SLOW, 12 * len(DRAFTERS), 1_000_000)
