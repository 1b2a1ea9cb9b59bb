"""Sampled requests that run ahead: every acceptance rule, the tokens of the host's executor.

The oracle is that executor with the request alone in it. Rules that keep the law say the same
whatever is drafted; the lossy ones depend on the drafts, so steps get room for all of them there.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from driver import Delivery, Job, hash_engine, model_engine
from run_ahead_driver import FakeRecorder, run_ahead_hash_engine, run_ahead_model_engine
from test_run_ahead import METHODS, make, random_jobs

from hash_target import HashFunction
from specdec_ext.models import load_model
from tiny_models import save_tiny

LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.1},
    {"temperature": 0.25},
    {"temperature": 0.3, "top_k": 6},
    {"temperature": 0.4, "top_p": 0.7},
    {"temperature": 0.3, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
]
LOSSLESS: list[dict[str, Any]] = [{}, {"acceptance": "rejection"}, {"acceptance": "best_beam"}]
LOSSY: list[dict[str, Any]] = [
    {"acceptance": "typical"},
    {"acceptance": "typical", "posterior_threshold": 0.02, "posterior_alpha": 0.9},
    {"acceptance": "threshold", "acceptance_threshold": 0.03},
]


def sampled_jobs(
    rng: random.Random,
    function: HashFunction,
    method: str,
    count: int,
    rules: list[dict[str, Any]],
) -> list[Job]:
    """Laws and rules at random, greedy requests among them, seeds of all 64 bits."""
    jobs = []
    for job in random_jobs(rng, function, method, count, 200):
        asked = {**rng.choice(LAWS), **rng.choice(rules), "seed": rng.randrange(2**64)}
        tokens = min(job.max_tokens, 60)
        jobs.append(dataclasses.replace(job, max_tokens=tokens, options={**job.options, **asked}))
    return jobs


def alone(function: HashFunction, method: str, job: Job) -> Delivery:
    """The request in the host's executor, with drafts of fixed length and room for them."""
    engine = hash_engine(
        function, adaptive=False, max_batch_size=1, max_seq_len=200, max_num_tokens=512,
        **METHODS[method],
    )  # fmt: skip
    (got,) = engine.run([dataclasses.replace(job, submit_step=0, cancel_step=None)])
    return got


def compare(job: Job, got: Delivery, wanted: Delivery) -> None:
    if got.cancelled:
        assert got.tokens == wanted.tokens[: len(got.tokens)]
        return
    assert got.tokens == wanted.tokens, job.options
    assert (got.finish_reason, got.stop_reason) == (wanted.finish_reason, wanted.stop_reason)


def run_schedule(
    seed: int,
    depth: int,
    method: str,
    rules: list[dict[str, Any]],
    sizes: dict[str, Any],
    recorder: FakeRecorder | None = None,
) -> int:
    """One random schedule; returns the drafts that were accepted."""
    rng = random.Random(seed)
    function = HashFunction(vocab=30, surprise=rng.choice([8, 30]), alphabet=4, seed=seed)
    engine = run_ahead_hash_engine(
        function,
        page_size=rng.choice([1, 4, 16]),
        max_seq_len=200,
        depth=depth,
        stub=None if seed % 5 == 0 else seed,
        recorder=recorder,
        **sizes,
        **METHODS[method],
    )
    jobs = sampled_jobs(rng, function, method, 6, rules)
    accepted = 0
    for job, got in zip(jobs, engine.run(jobs), strict=True):
        wanted = alone(function, method, job)
        compare(job, got, wanted)
        whole_steps = sizes["max_num_tokens"] > 500 and not got.cancelled
        if whole_steps:  # the same steps, draft for draft
            assert got.forwards - -(-len(job.prompt) // 512) == wanted.forwards - 1
            assert (got.num_drafts, got.num_accepted) == (wanted.num_drafts, wanted.num_accepted)
        accepted += got.num_accepted
    return accepted


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_mixed_rules_in_one_batch(depth: int, method: str) -> None:
    sizes = {"max_batch_size": 4, "max_num_tokens": 1024}
    accepted = sum(
        run_schedule(seed, depth, method, LOSSLESS + LOSSY, sizes) for seed in range(40, 48)
    )
    assert (accepted > 40) == (method != "none")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_lossless_rules_do_not_depend_on_what_is_drafted(depth: int, method: str) -> None:
    """Steps with too few rows for all drafts, prompts in chunks."""
    for seed in range(70, 76):
        sizes = {"max_batch_size": 1 + seed % 4, "max_num_tokens": 5 + 9 * (seed % 3)}
        run_schedule(seed, depth, method, LOSSLESS, sizes)


@pytest.mark.parametrize("method", METHODS)
def test_replayed_steps_say_the_same(method: str) -> None:
    """Greedy steps and steps that sample are recorded apart; padding is poisoned."""
    replayed = 0
    for seed in range(90, 94):
        recorder = FakeRecorder()
        sizes = {"max_batch_size": 4, "max_num_tokens": 1024}
        run_schedule(seed, seed % 3, method, LOSSLESS + LOSSY, sizes, recorder)
        replayed += recorder.replayed
    assert replayed > 100


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_many_mixed_rules(depth: int, method: str) -> None:
    sizes = {"max_batch_size": 5, "max_num_tokens": 1024}
    for seed in range(200, 260):
        run_schedule(seed, depth, method, LOSSLESS + LOSSY, sizes)


@pytest.mark.parametrize("method", ["none", "lookahead", "ngram"])
def test_a_native_model_draws_the_same(tmp_path_factory: Any, method: str) -> None:
    folder = save_tiny(tmp_path_factory.mktemp("sampled") / "model")
    model = load_model(folder, dtype="float32", max_rows=256, max_seq_len=160)
    rng = random.Random(5)
    sizes = {"max_batch_size": 5, "max_seq_len": 160, "max_num_tokens": 256}
    jobs = []
    for i, rule in enumerate(LOSSLESS + LOSSY):
        prompt = [rng.randrange(model.vocab_size) for _ in range(3 + 4 * i)] * 2
        options = {**LAWS[i % len(LAWS)], **rule, "seed": 77 + i}
        jobs.append(Job(prompt, 40, options, submit_step=i % 3))
    wanted = []
    for job in jobs:
        host = model_engine(model, adaptive=False, **sizes, **METHODS[method])
        wanted += [d.tokens for d in host.run([dataclasses.replace(job, submit_step=0)])]
    for depth in (0, 1, 2):
        engine = run_ahead_model_engine(
            model, depth=depth, stub=depth or None, **sizes, **METHODS[method]
        )
        assert [d.tokens for d in engine.run(jobs)] == wanted


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "message"), [(np.nan, "hold a NaN"), (-np.inf, "all -infinity")])
def test_a_row_without_a_law_ends_its_request_alone(value: float, message: str) -> None:
    function = HashFunction(vocab=30, seed=4)
    engine = run_ahead_hash_engine(
        function, max_batch_size=3, max_seq_len=120, max_num_tokens=90, depth=2, stub=3,
        **METHODS["none"],
    )  # fmt: skip
    forward = engine.model.forward

    def spoilt(plan: Any) -> torch.Tensor:
        scores = forward(plan)
        assert plan.needs_logits
        for b in range(plan.num_requests):
            if plan.kv_len[b] == 2:  # of these requests only the first is ever that short
                scores[plan.cu_logits[b] : plan.cu_logits[b + 1]] = value
        return scores

    engine.model.forward = spoilt
    asked = {"temperature": 0.5, "seed": 3}
    jobs = [Job([7], 30, asked), Job([1, 2, 3, 4], 30, asked), Job([5] * 12, 30, asked)]
    wanted = [alone(function, "none", job) for job in jobs]
    got = engine.run(jobs)
    assert (got[0].finish_reason, got[0].tokens) == ("error", wanted[0].tokens[:2])
    assert message in str(got[0].error)
    for d, other in zip(got[1:], wanted[1:], strict=True):
        assert (d.tokens, d.finish_reason) == (other.tokens, "length")


def test_scores_of_a_wrong_shape_end_the_step() -> None:
    function = HashFunction(vocab=30, seed=4)
    engine = run_ahead_hash_engine(
        function, max_batch_size=1, max_seq_len=120, max_num_tokens=90, depth=1, **METHODS["none"]
    )
    forward = engine.model.forward
    engine.model.forward = lambda plan: forward(plan)[:, :-1]
    (got,) = engine.run([Job([7, 8], 30, {"temperature": 0.5})])
    assert got.finish_reason == "error"
    assert "scores of shape [1, 29], [1, 30] were asked for" in str(got.error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p = 0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k = -1"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p = 1.5"),
        ({"acceptance": "typical", "posterior_alpha": 0.0}, "posterior_alpha = 0"),
        ({"acceptance": "threshold", "acceptance_threshold": 2.0}, "acceptance_threshold = 2"),
        ({"acceptance": "luck"}, "acceptance = 'luck'"),
    ],
)
def test_laws_and_rules_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    executor = make()
    with pytest.raises(ValueError, match=message):
        executor.submit([1, 2], max_tokens=4, **options)
    assert executor.num_unfinished == 0


def test_a_vocabulary_too_large_to_draw_from_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1048576 tokens can be drawn from"):
        make(vocab_size=(1 << 20) + 1)
