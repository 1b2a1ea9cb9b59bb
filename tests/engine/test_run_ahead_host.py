"""Requests whose tokens the host chooses (score processors, logprobs) beside others that run ahead.

The oracle is the executor of the host with the request alone in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from driver import Delivery, Job, hash_engine
from engine_loop_cases import FUNCTION, PROMPTS, VOCAB, assert_idle, make_engine
from engine_loop_cases import METHODS as LOOP_METHODS
from run_ahead_driver import random_hash_engine, run_ahead_hash_engine
from test_run_ahead import METHODS, random_jobs

from hash_target import HashFunction
from specdec_ext.request.sampling_params import SamplingParams

DEPTHS = [0, 1, 2]


def host_options(rng: random.Random, vocab: int) -> dict[str, Any]:
    """One request's features, of those that need the host."""
    kinds: list[dict[str, Any]] = [
        {"min_tokens": 1},
        {"logprobs": rng.choice([0, 3])},
        {"prompt_logprobs": rng.choice([0, 2])},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8, "frequency_penalty": -0.3},
        {"logit_bias": {rng.randrange(vocab): rng.choice([-5.0, 2.0])}},
        {"bad_words": [[rng.randrange(4)], [rng.randrange(4), rng.randrange(4)]]},
        {"allowed_token_ids": rng.sample(range(vocab), 7)},
    ]
    options: dict[str, Any] = {}
    for kind in rng.sample(kinds, rng.choice([1, 1, 2])):
        options.update(kind)
    if rng.random() < 0.4:
        options.update({"temperature": 0.4, "top_k": rng.choice([0, 6])})
    return options


def alone(function: HashFunction, job: Job) -> Delivery:
    """By the executor of the host, decoded plainly."""
    engine = hash_engine(function, max_batch_size=1, max_seq_len=200, max_num_tokens=512)
    options = {k: v for k, v in job.options.items() if k not in ("lookahead", "max_draft_len")}
    (got,) = engine.run(
        [dataclasses.replace(job, options=options, submit_step=0, cancel_step=None)]
    )
    return got


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_random_schedules_of_both_kinds(depth: int, method: str) -> None:
    chosen = drafted = 0
    for seed in range(300, 310):
        rng = random.Random(seed)
        function, engine = random_hash_engine(
            rng, seed, depth, batch_sizes=(1, 3, 5, 12), **METHODS[method]
        )
        jobs = random_jobs(rng, function, method, 10 if seed % 3 else 14, 200)
        for job in jobs:
            if rng.random() < (0.5 if seed % 3 else 0.9):
                job.options.update(host_options(rng, function.vocab))
                job.max_tokens = min(job.max_tokens, 50)
                if "min_tokens" in job.options:
                    job.options["min_tokens"] = rng.randrange(1, job.max_tokens + 1)
                staging = engine.executor.staging_layout
                if rng.random() < 0.4 and staging.rows > staging.requests:
                    right = function.reference(job.prompt, min(3, staging.rows - staging.requests))
                    job.options["external_drafts"] = [*right[:-1], rng.choice([right[-1], 0])]
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            wanted = alone(function, job)
            chosen += len(got.tokens)
            if got.cancelled:
                assert got.tokens == wanted.tokens[: len(got.tokens)]
                continue
            assert got.tokens == wanted.tokens, job.options
            assert (got.finish_reason, got.stop_reason) == (
                wanted.finish_reason, wanted.stop_reason,
            )  # fmt: skip
            assert got.error == wanted.error
            assert got.logprobs == wanted.logprobs
            assert got.prompt_logprobs == wanted.prompt_logprobs
            drafted += got.num_drafts if "logprobs" in job.options else 0
    assert chosen > 1500
    assert drafted > 20 or method == "none"


@pytest.mark.parametrize("depth", DEPTHS)
def test_others_run_ahead_meanwhile(depth: int) -> None:
    """A plain request takes as many steps as without the other, which waits for its own alone."""
    function = HashFunction(vocab=30, seed=4)
    engine = run_ahead_hash_engine(
        function, max_batch_size=2, max_seq_len=200, max_num_tokens=100, depth=depth,
        stub=7, **METHODS["none"],
    )  # fmt: skip
    plain = engine.submit([1, 2, 3], max_tokens=60)
    slow = engine.submit([4, 5], max_tokens=60, repetition_penalty=1.2)
    steps: dict[int, list[int]] = {plain: [], slow: []}
    tokens = {plain: 0, slow: 0}
    count = 0
    while (outputs := engine.step()) is not None:
        if tokens[plain] < 60:
            count += 1
        for out in outputs:
            steps[out.request_id].append(count)
            tokens[out.request_id] += len(out.tokens)
    assert tokens == {plain: 60, slow: 60}
    assert len(steps[plain]) == 60 and count == 60 + depth  # one token each step
    while_both = [at for at in steps[slow] if at <= 60]
    apart = {b - a for a, b in itertools.pairwise(while_both)}
    assert apart == {depth + 1}
    engine.assert_idle()


def reversing(text: list[int], scores: torch.Tensor) -> torch.Tensor:
    """The worst token, so that a draft is never right; depends on the whole text."""
    return -scores + torch.roll(scores, sum(text) % VOCAB) * 0.25


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", LOOP_METHODS)
def test_a_python_processor_says_the_same(method: str, depth: int) -> None:
    params = [
        SamplingParams(max_tokens=25, logits_processors=[reversing]),
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=25, logits_processors=[reversing], logprobs=2, temperature=0.3,
                       seed=5, repetition_penalty=1.1),
        SamplingParams(max_tokens=30, stop=["\x00never"], min_tokens=3),
    ]  # fmt: skip
    answers = []
    for ahead in (None, depth):
        engine = make_engine(LOOP_METHODS[method], run_ahead=ahead)
        states = [engine.submit(engine.resolve(p, s)) for p, s in zip(PROMPTS, params, strict=True)]
        engine.run(states)
        outputs = [s.snapshot().outputs[0] for s in states]
        answers.append([(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in outputs])
        assert_idle(engine)
    assert answers[0] == answers[1]
    assert answers[0][1][0] == FUNCTION.reference(PROMPTS[1], 40)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_failing_processor_ends_its_request_alone(depth: int) -> None:
    def fails(text: list[int], scores: torch.Tensor) -> torch.Tensor:
        if len(text) > 12:
            raise KeyError("tired")
        return scores

    engine = make_engine(LOOP_METHODS["ngram"], run_ahead=depth)
    bad = engine.submit(
        engine.resolve(PROMPTS[0], SamplingParams(max_tokens=30, logits_processors=[fails]))
    )
    good = engine.submit(engine.resolve(PROMPTS[2], SamplingParams(max_tokens=30)))
    engine.run([bad, good])
    assert bad.finish_reason == "error" and "KeyError: 'tired'" in (bad.error or "")
    assert bad.token_ids == FUNCTION.reference(PROMPTS[0], 30)[: 13 - len(PROMPTS[0])]
    assert good.token_ids == FUNCTION.reference(PROMPTS[2], 30)
    assert_idle(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_ctrl_c_in_a_processor_keeps_the_engine(depth: int) -> None:
    struck: list[bool] = []

    def interrupts(text: list[int], scores: torch.Tensor) -> torch.Tensor:
        if len(text) > 12 and not struck:
            struck.append(True)
            raise KeyboardInterrupt
        return scores

    engine = make_engine(run_ahead=depth)
    state = engine.submit(
        engine.resolve(PROMPTS[0], SamplingParams(max_tokens=30, logits_processors=[interrupts]))
    )
    other = engine.submit(engine.resolve(PROMPTS[1], SamplingParams(max_tokens=30)))
    with pytest.raises(KeyboardInterrupt):
        engine.run([state, other])
    engine.run([state, other])  # the step goes on where it was interrupted
    assert struck and state.token_ids == FUNCTION.reference(PROMPTS[0], 30)
    assert other.token_ids == FUNCTION.reference(PROMPTS[1], 30)
    assert_idle(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_cancelled_while_its_scores_are_in_flight(depth: int) -> None:
    for stage in range(6):
        engine = make_engine(run_ahead=depth)
        params = SamplingParams(max_tokens=30, logits_processors=[reversing])
        victim, other = (engine.submit(engine.resolve(p, params)) for p in PROMPTS[:2])
        for _ in range(stage):
            engine.step()
        assert engine.cancel(victim)
        engine.run([other])
        assert len(other.token_ids) == 30
        assert_idle(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 9}, r"min_tokens = 9: give 0..max_tokens \(4\)"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0"),
        ({"bad_words": [[]]}, "bad_words holds an empty sequence"),
        ({"bad_words": [[50]]}, "bad_words holds token id 50"),
        ({"allowed_token_ids": [50]}, "allowed_token_ids holds token id 50"),
        ({"logit_bias": {50: 1.0}}, "logit_bias holds token id 50"),
        ({"logprobs": 51}, "logprobs = 51: give 0..50"),
    ],
)
def test_processors_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    from test_run_ahead import make

    executor = make()
    with pytest.raises(ValueError, match=message):
        executor.submit([1, 2], max_tokens=4, **options)
    assert executor.num_unfinished == 0
