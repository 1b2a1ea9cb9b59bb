"""Run-ahead changes nothing in the tokens: steps are planned before earlier ones were read.

The oracle is the definition (hash_target.py), for counts the executor of the host. The stub stream
runs enqueued work as late or as early as is legal; pages that are given back are poisoned at once.
The bookkeeping alone, and mistakes in it, are the subject of tests/cpp/test_run_ahead.cc.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Job, hash_engine, model_engine
from run_ahead_driver import random_hash_engine, run_ahead_hash_engine, run_ahead_model_engine

from hash_target import HashFunction
from specdec_ext import _core
from specdec_ext.models import load_model
from tiny_models import save_tiny

METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "lookahead": {"method": "lookahead", "lookahead": (4, 3, 4)},
    "lookahead-7": {"method": "lookahead", "lookahead": (7, 7, 7)},
    "ngram": {"method": "ngram", "ngram": {"max_draft_len": 8, "max_matching_ngram_size": 3}},
}


def random_jobs(
    rng: random.Random, function: HashFunction, method: str, count: int, room: int
) -> list[Job]:
    """Requests of all kinds that run-ahead serves."""
    jobs = []
    for _ in range(count):
        prompt = [rng.randrange(function.vocab) for _ in range(rng.choice([1, 2, 9, 30, 70]))]
        options: dict[str, Any] = {"seed": rng.randrange(2**60)}
        if rng.random() < 0.2:
            options["speculative"] = False
        elif method.startswith("lookahead") and rng.random() < 0.4:
            options["lookahead"] = rng.choice([(2, 2, 1), (3, 3, 0), (1, 1, 0)])
        elif method == "ngram" and rng.random() < 0.4:
            options["max_draft_len"] = rng.choice([0, 1, 3])
        if rng.random() < 0.3:
            options["stop_token_ids"] = [rng.randrange(function.vocab)]
        if rng.random() < 0.2:
            options["eos_token_ids"] = [rng.randrange(function.vocab)]
            options["ignore_eos"] = rng.random() < 0.3
        max_tokens = rng.choice([1, 2, 17, 60, room - len(prompt)])
        cancel = rng.randrange(30) if rng.random() < 0.15 else None
        jobs.append(Job(prompt, max_tokens, options, rng.randrange(15), cancel))
    return jobs


def expected(function: HashFunction, job: Job) -> tuple[list[int], str]:
    """Tokens and reason of the end, by the definition."""
    stops = set(job.options.get("stop_token_ids", []))
    if not job.options.get("ignore_eos"):
        stops |= set(job.options.get("eos_token_ids", []))
    text = function.reference(job.prompt, job.max_tokens)
    for i, token in enumerate(text):
        if token in stops:
            return text[: i + 1], "stop"
    return text, "length"


def run_schedule(seed: int, depth: int, method: str, count: int = 6) -> int:
    """One random schedule against the definition; returns the tokens compared."""
    rng = random.Random(seed)
    function, engine = random_hash_engine(
        rng, seed, depth, surprises=(1, 8, 30), most_rows=(5, 40, 300), **METHODS[method]
    )
    jobs = random_jobs(rng, function, method, count, 200)
    tokens = 0
    for job, got in zip(jobs, engine.run(jobs), strict=True):
        text, reason = expected(function, job)
        tokens += len(got.tokens)
        if got.cancelled:
            assert got.tokens == text[: len(got.tokens)]
            continue
        assert got.tokens == text
        assert got.finish_reason == reason
        if reason == "stop":
            stops = job.options.get("stop_token_ids", [])
            ended_by = text[-1] if text[-1] in stops else None
            eos = [] if job.options.get("ignore_eos") else job.options.get("eos_token_ids", [])
            assert got.stop_reason == (None if text[-1] in eos else ended_by)
    return tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_schedules(depth: int, method: str) -> None:
    tokens = sum(run_schedule(seed, depth, method) for seed in range(12))
    assert tokens > 1000


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_hundred_thousand_tokens(depth: int, method: str) -> None:
    """Over all twelve cases; with the schedules of the C++ test more than ten thousand."""
    tokens = sum(run_schedule(seed, depth, method, count=10) for seed in range(100, 160))
    assert tokens > 9000


@pytest.mark.parametrize("method", METHODS)
def test_steps_and_counts_are_those_of_the_host_executor(method: str) -> None:
    """Alone in a batch with room for all drafts, a request takes the same steps either way."""
    rng = random.Random(7)
    function = HashFunction(vocab=40, surprise=9, alphabet=4, seed=3)
    for index in range(6):
        prompt = [rng.randrange(40) for _ in range(rng.choice([1, 5, 40]))]
        job = Job(prompt, 80, {"seed": 1000 + index})
        sizes = {"max_batch_size": 2, "max_seq_len": 200, "max_num_tokens": 256}
        host = hash_engine(function, adaptive=False, **sizes, **METHODS[method])
        (plain,) = host.run([job])
        for depth in (0, 1, 2):
            engine = run_ahead_hash_engine(
                function, depth=depth, stub=index if depth else None, **sizes, **METHODS[method]
            )
            (got,) = engine.run([job])
            assert (got.tokens, got.forwards) == (plain.tokens, plain.forwards)
            assert (got.num_drafts, got.num_accepted) == (plain.num_drafts, plain.num_accepted)
            stats, wanted = engine.stats(), host.ex.stats()
            for key in ("rows", "prefill_rows", "num_draft_tokens", "num_accepted_tokens",
                        "num_drafts", "generated_tokens", "finished"):  # fmt: skip
                assert stats[key] == wanted[key], key
            assert stats["steps"] - stats["empty_steps"] == wanted["steps"]
            assert stats["empty_steps"] <= depth


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("run_ahead") / "model")


@pytest.mark.parametrize("method", ["none", "lookahead", "ngram"])
def test_a_native_model_says_the_same_at_every_depth(tiny: Path, method: str) -> None:
    model = load_model(tiny, dtype="float32", max_rows=256, max_seq_len=160)
    rng = random.Random(5)
    sizes = {"max_batch_size": 3, "max_seq_len": 160, "max_num_tokens": 200}
    jobs = [
        Job([rng.randrange(model.vocab_size) for _ in range(n)], 40, {"seed": n}, submit_step=n % 4)
        for n in (3, 20, 50, 7)
    ]
    host = model_engine(model, adaptive=False, **sizes, **METHODS[method])
    wanted = [d.tokens for d in host.run(jobs)]
    assert all(len(tokens) == 40 for tokens in wanted)
    for depth in (0, 1, 2):
        engine = run_ahead_model_engine(
            model, depth=depth, stub=depth or None, **sizes, **METHODS[method]
        )
        assert [d.tokens for d in engine.run(jobs)] == wanted


# -- failures -------------------------------------------------------------------------------------


def test_a_failed_pass_ends_its_requests_and_nobody_else() -> None:
    function = HashFunction(vocab=30, seed=4)
    engine = run_ahead_hash_engine(
        function, max_batch_size=2, max_seq_len=120, max_num_tokens=60, depth=1,
        **METHODS["lookahead"],
    )  # fmt: skip
    forward, calls = engine.model.forward, iter(range(10_000))

    def fails_once(plan: Any) -> torch.Tensor:
        if next(calls) == 5:
            raise RuntimeError("out of luck")
        return forward(plan)

    engine.model.forward = fails_once
    jobs = [Job([i, 2, 3], 30) for i in range(5)]
    got = engine.run(jobs)
    failed = [d for d in got if d.finish_reason == "error"]
    assert len(failed) == 2
    assert all("out of luck" in str(d.error) for d in failed)
    for job, d in zip(jobs, got, strict=True):
        text = function.reference(job.prompt, 30)
        assert d.tokens == (text if d.finish_reason == "length" else text[: len(d.tokens)])


def test_a_nan_ends_the_request_alone() -> None:
    function = HashFunction(vocab=30, seed=4)
    engine = run_ahead_hash_engine(
        function, max_batch_size=3, max_seq_len=120, max_num_tokens=90, depth=2, stub=3,
        **METHODS["none"],
    )  # fmt: skip
    forward = engine.model.forward

    def spoilt(plan: Any) -> torch.Tensor:
        ids = forward(plan)
        for b in range(plan.num_requests):
            if plan.kv_len[b] == 2:  # of these requests only the first is ever that short
                ids[plan.cu_logits[b] : plan.cu_logits[b + 1]] = -1
        return ids

    engine.model.forward = spoilt
    jobs = [Job([7], 30), Job([1, 2, 3, 4], 30), Job([5] * 12, 30)]
    victim = function.reference(jobs[0].prompt, 30)
    got = engine.run(jobs)
    assert (got[0].finish_reason, got[0].tokens) == ("error", victim[:2])
    assert "NaN" in str(got[0].error)
    for job, d in list(zip(jobs, got, strict=True))[1:]:
        assert (d.tokens, d.finish_reason) == (function.reference(job.prompt, 30), "length")


@pytest.mark.parametrize(("word", "value"), [(0, 77), (0, 0), (0, -1), (3, 9), (-2, 4)])
def test_a_result_that_cannot_be_ends_its_request_alone(word: int, value: int) -> None:
    """num_tokens, the reason of the end, or a request's flags are not what a device may write."""
    function = HashFunction(vocab=30, seed=4)
    engine = run_ahead_hash_engine(
        function, max_batch_size=2, max_seq_len=120, max_num_tokens=90, depth=1, **METHODS["none"]
    )
    jobs = [[7, 8], [1, 2, 3]]
    ids = [engine.submit(prompt, max_tokens=20) for prompt in jobs]
    assert engine.step() == []
    ring = engine.pipeline.buffers.result_ring
    ring[0, word] = value  # of the first request, before it is read
    outputs = engine.drain()
    first = [out for out in outputs if out.request_id == ids[0]]
    assert [out.finish_reason for out in first] == ["error"]
    assert "please report" in str(first[0].error)
    assert first[0].tokens == []
    others = [token for out in outputs if out.request_id == ids[1] for token in out.tokens]
    assert others == function.reference(jobs[1], 20)
    engine.assert_idle()


def make(**changed: Any) -> Any:
    sizes = {"vocab_size": 50, "max_batch_size": 2, "max_seq_len": 64, "max_num_tokens": 64,
             "num_pages": 40, "page_size": 4}  # fmt: skip
    return _core.Executor(**{**sizes, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"overlap_depth": 3}, r"overlap_depth = 3: give 0\.\.2"),
        ({"overlap_depth": -1}, "overlap_depth = -1"),
        ({"max_num_tokens": 1}, "raise max_num_tokens or lower max_batch_size"),
        ({"page_size": 3}, "a power of two"),
        ({"num_pages": 0}, "num_pages = 0"),
    ],
)
def test_what_cannot_run_ahead_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5, "top_p": 2.0}, "top_p = 2"),
        (
            {"stop_token_ids": list(range(48)) * 5, "eos_token_ids": list(range(20))},
            "260 end and stop",
        ),
        ({"stop_token_ids": [50]}, "stop_token_ids holds token id 50"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"lookahead": (5, 3, 4)}, r"\(5, 3, 4\) exceeds the engine's \(4, 3, 4\)"),
        ({"max_draft_len": 2}, "not built for prompt lookup"),
        ({"prompt": []}, "prompt_token_ids is empty"),
        ({"prompt": [50]}, "prompt_token_ids holds token id 50"),
        ({"prompt": [1] * 64}, "the prompt has 64 tokens, max_seq_len is 64"),
    ],
)
def test_a_request_that_cannot_run_ahead_is_refused(options: dict[str, Any], message: str) -> None:
    executor = make(**METHODS["lookahead"])
    given = {"prompt": [1, 2], "max_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        executor.submit(given.pop("prompt"), **given)
    assert executor.num_unfinished == 0


def test_a_request_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="the whole pool has 8: lower max_tokens"):
        make(num_pages=8).submit([1, 2], max_tokens=60)


def test_calls_out_of_order_are_refused() -> None:
    executor = make(overlap_depth=1)
    with pytest.raises(ValueError, match="needs bind_rings"):
        executor.stage()
    with pytest.raises(ValueError, match="no step is in flight"):
        executor.deliver()
    words = executor.staging_layout.words
    rings = {
        "staging": torch.zeros(executor.ring_size, words, dtype=torch.int32),
        "entries": torch.zeros(executor.ring_size, executor.entry_bytes, dtype=torch.uint8),
        "results": torch.zeros(executor.ring_size, executor.result_words, dtype=torch.int32),
        "scores": torch.zeros(executor.ring_size, executor.max_host_rows, 50),
        "trees": torch.zeros(executor.ring_size, 2, executor.tree_words, dtype=torch.int32),
    }
    for name in rings:
        with pytest.raises(ValueError, match=name):
            executor.bind_rings(**{**rings, name: rings[name][:1]})
    executor.bind_rings(**rings)
    executor.submit([1, 2, 3], max_tokens=9)
    assert executor.stage() is not None
    with pytest.raises(ValueError, match="step 7 is not in flight"):
        executor.fail_step(7, "why")
    executor.submit([1, 2, 3], max_tokens=9)
    assert executor.stage() is not None
    with pytest.raises(ValueError, match="plan\\(\\) with 2 steps unread"):
        executor.stage()
