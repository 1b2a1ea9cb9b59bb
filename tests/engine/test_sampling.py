"""Sampled text is what plain sampling with the same seed says, whatever drafts and whoever is near.

A token is a function of the scores, the law, the seed and its position (algo/sample.h). So the
expectation is a loop in plain Python over the definition of the hash target and a reference of the
draw: no executor, no batch, no draft takes part in it, and every token is compared.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from driver import Job, hash_engine
from engine_loop_cases import FUNCTION, METHODS, PROMPTS, make_engine, run
from test_equality_synthetic import DRAFTERS, Drafter, lookahead, make_prompt, ngram

from hash_target import HashFunction
from reference.sampling_reference import Law, draw, probabilities, token_uniform
from specdec_ext import UnsupportedRequestError
from specdec_ext.errors import RequestError
from specdec_ext.request.resolve import stream_seed
from specdec_ext.request.sampling_params import SamplingParams

LAWS = [
    Law(0.08),
    Law(0.15, top_k=5),
    Law(0.3, top_p=0.8),
    Law(0.2, min_p=0.1),
    Law(1.0),
    Law(0.12, top_k=30, top_p=0.95),
]


def definition(
    function: HashFunction, prompt: list[int], num_tokens: int, law: Law, seed: int
) -> list[int]:
    """Plain sampling, one token after another."""
    history = list(prompt)
    for _ in range(num_tokens):
        scores = function.reference_scores(history)
        history.append(draw(scores, law, token_uniform(seed, len(history))))
    return history[len(prompt) :]


def make_jobs(rng: random.Random, drafter: Drafter, vocab: int, count: int) -> list[Job]:
    jobs = []
    for _ in range(count):
        law = rng.choice(LAWS)
        options = {**rng.choice(drafter.variants), **law.options(), "seed": rng.randrange(1 << 62)}
        jobs.append(
            Job(
                make_prompt(rng, vocab), rng.randint(1, 50), options, submit_step=rng.randint(0, 25)
            )
        )
    return jobs


def run_case(drafter: Drafter, batch: int, count: int, seed: int) -> int:
    """Returns the number of drafts that were accepted."""
    rng = random.Random(f"{drafter.name}-{batch}-{seed}")
    function = HashFunction(vocab=rng.choice([7, 64, 300]), surprise=10, seed=rng.randrange(1000))
    engine = hash_engine(
        function, page_size=rng.choice([1, 4, 16]), max_batch_size=batch, max_seq_len=160,
        max_num_tokens=max(batch, rng.choice([17, 64, 512])), **drafter.options,
    )  # fmt: skip
    jobs = make_jobs(rng, drafter, function.vocab, count)
    for job, got in zip(jobs, engine.run(jobs), strict=True):
        law = Law(**{name: job.options[name] for name in Law(1.0).options()})
        expected = definition(function, job.prompt, job.max_tokens, law, job.options["seed"])
        assert got.tokens == expected, job
    return int(engine.ex.stats()["num_accepted_tokens"])


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.name)
def test_sampled_tokens_equal_the_definition(drafter: Drafter, batch: int) -> None:
    accepted = run_case(drafter, batch, count=8, seed=0)
    # Low temperatures repeat themselves often enough for drafts to be right.
    assert (accepted > 0) == (drafter.name not in ("none", "lookahead-1-1-0"))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.name)
def test_sampled_tokens_equal_the_definition_at_length(drafter: Drafter) -> None:
    for seed in range(1, 11):
        run_case(drafter, 1 + seed % 9, count=40, seed=seed)


@pytest.mark.parametrize("drafter", [lookahead(4, 3, 4), ngram(6, 2)], ids=lambda d: d.name)
def test_penalties_and_bans_act_along_the_path(drafter: Drafter) -> None:
    """With processors too the text is that of plain decoding, drafts accepted or not."""
    options: dict[str, Any] = {
        "temperature": 0.3, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.05,
        "frequency_penalty": 0.1, "bad_words": [[3, 4], [5]], "logit_bias": {2: 0.2},
        "min_tokens": 10, "stop_token_ids": [1], "logprobs": 2,
    }  # fmt: skip
    function = HashFunction(vocab=40, surprise=20, seed=4)
    texts = []
    for engine_options in ({"method": "none"}, drafter.options):
        engine = hash_engine(function, max_batch_size=4, **engine_options)
        jobs = [Job([i, 7, 8, 7, 8], 60, dict(options, seed=i)) for i in range(8)]
        deliveries = engine.run(jobs)
        texts.append([(d.tokens, d.finish_reason, d.logprobs) for d in deliveries])
    assert texts[0] == texts[1]
    for tokens, _, _ in texts[0]:
        assert 5 not in tokens
        assert 1 not in tokens[:9]
        assert (3, 4) not in itertools.pairwise(tokens)


def test_streams_of_requests_are_independent_and_reproducible() -> None:
    """Unseeded requests differ; the same engine seed and order give the same texts again."""
    params = SamplingParams(temperature=1.0, max_tokens=12)
    first = [o.outputs[0].token_ids for o in run(make_engine(None), [[1, 2]] * 20, params)]
    again = [o.outputs[0].token_ids for o in run(make_engine(None), [[1, 2]] * 20, params)]
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 20
    seeded = SamplingParams(temperature=1.0, max_tokens=12, seed=5)
    same = [o.outputs[0].token_ids for o in run(make_engine(None), [[1, 2]] * 20, seeded)]
    assert len({tuple(tokens) for tokens in same}) == 1
    assert len({stream_seed(0, i) for i in range(10_000)}) == 10_000


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_loop_samples(method: str) -> None:
    """Through the engine loop: text, counts and seeds, as the definition says."""
    law = Law(0.2, top_p=0.95)
    params = SamplingParams(temperature=0.2, top_p=0.95, seed=-3, max_tokens=30)
    for prompt, output in zip(
        PROMPTS, run(make_engine(METHODS[method]), PROMPTS, params), strict=True
    ):
        expected = definition(FUNCTION, prompt, 30, law, -3 & (2**64 - 1))
        assert output.outputs[0].token_ids == expected


def test_top_k_of_one_and_temperature_zero_are_greedy() -> None:
    expected = [FUNCTION.reference(prompt, 20) for prompt in PROMPTS]
    for params in (
        SamplingParams(max_tokens=20, temperature=0.0, top_p=0.5, min_p=0.2, top_k=9),
        SamplingParams(max_tokens=20, temperature=3.0, top_k=1),
    ):
        outputs = run(make_engine(METHODS["ngram"]), PROMPTS, params)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        assert params.greedy


def test_nothing_allowed_and_nan_rows_fail_alone() -> None:
    function = HashFunction(vocab=20)
    engine = hash_engine(function, max_batch_size=2, **ngram(4, 2).options)
    sampling = {"temperature": 1.0, "seed": 1}
    banned = {"allowed_token_ids": [4], "bad_words": [[4]]}
    bad, good = engine.run([Job([1], 5, {**sampling, **banned}), Job([1], 5, sampling)])
    assert bad.finish_reason == "error"
    assert "no token is allowed" in (bad.error or "")
    assert good.tokens == definition(function, [1], 5, Law(1.0), 1)


def test_first_tokens_follow_the_law() -> None:
    """20,000 unseeded requests on one prompt: chi-square of their first token, p > 1e-6."""
    function = HashFunction(vocab=24, surprise=10, seed=9)
    law = Law(0.4, top_k=20)
    engine = hash_engine(function, page_size=4, max_batch_size=500, max_seq_len=8)
    jobs = [Job([3], 1, {**law.options(), "seed": stream_seed(0, i)}) for i in range(20_000)]
    counts = Counter(d.tokens[0] for d in engine.run(jobs))
    p = probabilities(function.reference_scores([3]), law)
    expected = 20_000 * p
    cells = expected >= 5
    observed = np.array([counts[t] for t in range(24)], float)
    assert observed[p == 0].sum() == 0
    chi2 = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    assert chi2 < 75  # 19 degrees of freedom: p = 1e-8


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -0.1}, r"temperature = -0.1: out of range.*0.0 is greedy"),
        ({"temperature": float("nan")}, "temperature = nan: must be finite"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p = 0.0: out of range"),
        ({"temperature": 1.0, "top_p": 1.1}, r"top_p = 1.1"),
        ({"temperature": 1.0, "min_p": -0.5}, r"min_p = -0.5"),
        ({"temperature": 1.0, "top_k": -2}, r"top_k = -2"),
        ({"temperature": 1.0, "seed": 1.5}, r"seed = 1.5"),
        ({"n": 2}, r"n = 2 with greedy decoding"),
        ({"temperature": 1.0, "n": 0}, r"n = 0"),
        ({"temperature": 1.0, "n": 129}, r"n = 129"),
    ],
)
def test_refusals(values: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        SamplingParams(**values)
    with pytest.raises(UnsupportedRequestError, match="best_of = 2"):
        SamplingParams(temperature=1.0, best_of=2)
