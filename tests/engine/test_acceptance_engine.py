"""Acceptance by probabilities through the executor and the LLM: wiring, seeds, errors, labels.

The expectation of rejection is a loop in plain Python over the definition of the hash target and
the reference of the rule, with the same drafts; every token is compared.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from driver import Job, hash_engine

from hash_target import HashFunction
from reference.acceptance_reference import (
    DRAFT,
    Drafts,
    best_beam,
    deepest,
    rejection,
    uniform,
)
from reference.sampling_reference import Law, draw, token_uniform

VOCAB = 24
# (drafts, scores, law, seed, position) -> what is accepted.
Rule = Callable[..., Any]
FUNCTION = HashFunction(vocab=VOCAB, surprise=10, seed=3)
SHAPES = [[-1, 0, 1, 2], [-1, -1, -1], [-1, -1, 0, 0, 1, 4], [-1]]
LAWS = [Law(0.3), Law(0.5, top_p=0.9), Law(0.4, top_k=8, min_p=0.02)]


def drafter_law(history: Sequence[int]) -> np.ndarray:
    """What the drafter draws from: the target's law, disturbed, a function of the history."""
    scores = FUNCTION.reference_scores(list(history)).astype(np.float64)
    noise = np.random.default_rng([abs(hash(tuple(history[-3:]))) % 2**31]).normal(0, 0.3, VOCAB)
    weights = np.exp((scores + noise - scores.max()) / 0.5)
    return (weights / weights.sum()).astype(np.float32)


def propose(history: Sequence[int], seed: int, shape: Sequence[int]) -> Drafts:
    """Drafts as a function of history and seed alone: numbers of the request's own stream."""
    tokens: list[int] = []
    rows = np.empty((len(shape), VOCAB), np.float32)
    for i, parent in enumerate(shape):
        path, above = [], parent
        while above >= 0:
            path.append(tokens[above])
            above = shape[above]
        text = [*history, *reversed(path)]
        rows[i] = drafter_law(text)
        q = rows[i].astype(np.float64)
        earlier = [j for j in range(i) if shape[j] == parent]
        q[[tokens[j] for j in earlier]] = 0.0
        steps = np.cumsum(q)
        u = uniform(seed, len(text), DRAFT, len(earlier))
        tokens.append(int(np.searchsorted(steps, u * steps[-1], side="right")))
    return Drafts(tokens, list(shape), rows)


def cut(drafts: Drafts, max_depth: int) -> list[int]:
    """Indices of the drafts that are no deeper than max_depth."""
    depth: list[int] = []
    for parent in drafts.parents:
        depth.append(1 + (depth[parent] if parent >= 0 else 0))
    return [i for i, d in enumerate(depth) if d <= max_depth]


def path_texts(drafts: Drafts, history: Sequence[int]) -> list[list[int]]:
    """The history in front of each row: the golden token's, then each draft's."""
    texts = [list(history)]
    for token, parent in zip(drafts.tokens, drafts.parents, strict=True):
        texts.append([*texts[parent + 1], token])
    return texts


def definition(
    prompt: list[int],
    num_tokens: int,
    seed: int,
    shape: Sequence[int],
    rule: Callable[[Drafts, np.ndarray, int], tuple[list[int], int, float]],
    law: Law,
    process: Callable[[np.ndarray, list[int]], np.ndarray] = lambda row, _: row,
) -> tuple[list[int], float]:
    """The text that the rule makes of these drafts, and its smallest margin."""
    history = list(prompt)
    first = process(FUNCTION.reference_scores(history), history)
    history.append(draw(first, law, token_uniform(seed, len(history))))
    margin = 1.0
    while len(history) < len(prompt) + num_tokens:
        drafts = propose(history, seed, shape)
        keep = cut(drafts, len(prompt) + num_tokens - len(history) - 1)
        place = {old: new for new, old in enumerate(keep)} | {-1: -1}
        assert drafts.probs is not None
        kept = Drafts(
            [drafts.tokens[i] for i in keep],
            [place[drafts.parents[i]] for i in keep],
            drafts.probs[keep],
        )
        texts = path_texts(kept, history)
        scores = np.stack([process(FUNCTION.reference_scores(t), t) for t in texts])
        path, token, near = rule(kept, scores, len(history))
        margin = min(margin, near)
        history += [kept.tokens[i] for i in path] + [token]
    return history[len(prompt) :], margin


class Run:
    """Requests whose drafts come from propose(), all in one executor."""

    def __init__(self, **engine: Any) -> None:
        self.engine = hash_engine(FUNCTION, max_batch_size=16, max_seq_len=128,
                                  method="proposed", **engine)  # fmt: skip

    def texts(self, jobs: list[Job], shapes: list[Sequence[int]]) -> list[list[int]]:
        ex = self.engine.ex
        ids = {}
        for i, job in enumerate(jobs):
            ids[ex.submit(job.prompt, max_tokens=job.max_tokens, **job.options)] = i
        texts: list[list[int]] = [[] for _ in jobs]
        done: set[int] = set()
        while len(done) < len(jobs):
            for rid, i in ids.items():
                if rid not in done and texts[i]:
                    job = jobs[i]
                    drafts = propose(job.prompt + texts[i], job.options["seed"], shapes[i])
                    ex.propose(rid, drafts.tokens, drafts.parents, drafts.probs)
            for out in self.engine.step() or []:
                texts[ids[out.request_id]] += out.tokens
                if out.finish_reason is not None:
                    assert out.finish_reason == "length", out.error
                    done.add(out.request_id)
        return texts


def make_jobs(rng: random.Random, count: int, **options: Any) -> tuple[list[Job], list[Any]]:
    jobs, shapes = [], []
    for _ in range(count):
        law = rng.choice(LAWS)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        seed = rng.randrange(1 << 62)
        jobs.append(Job(prompt, rng.randint(1, 25), {**law.options(), "seed": seed, **options}))
        shapes.append(rng.choice(SHAPES))
    return jobs, shapes


def law_of(job: Job) -> Law:
    return Law(**{name: job.options[name] for name in Law(1.0).options()})


def assert_definition(run: Run, jobs: list[Job], shapes: list[Any], rule: Rule) -> None:
    """Every text is what `rule` accepts; one may differ where two numbers all but tie."""
    near = 0
    for job, shape, got in zip(jobs, shapes, run.texts(jobs, shapes), strict=True):
        law, seed = law_of(job), job.options["seed"]
        want, margin = definition(
            job.prompt, job.max_tokens, seed, shape,
            lambda d, s, at, law=law, seed=seed: rule(d, s, law, seed, at), law,
        )  # fmt: skip
        near += got != want
        assert got == want or margin < 1e-5
    assert near <= 1


@pytest.mark.parametrize(
    ("acceptance", "rule", "page_size"),
    [("rejection", rejection, 1), ("rejection", rejection, 4), ("best_beam", best_beam, 4)],
)
def test_rules_equal_their_definition(acceptance: str, rule: Rule, page_size: int) -> None:
    jobs, shapes = make_jobs(random.Random(f"{acceptance} {page_size}"), 24, acceptance=acceptance)
    run = Run(page_size=page_size)
    assert_definition(run, jobs, shapes, rule)
    assert run.engine.ex.stats()["num_accepted_tokens"] > 50


@pytest.mark.parametrize(
    ("acceptance", "options", "numbers"),
    [
        ("threshold", {"acceptance_threshold": 0.5}, {"threshold": 0.5}),
        ("typical", {}, {"typical": (float(np.float32(0.09)), float(np.float32(0.3)))}),
    ],
)
def test_lossy_rules_equal_their_definition(
    acceptance: str, options: dict[str, Any], numbers: dict[str, Any]
) -> None:
    jobs, shapes = make_jobs(random.Random(acceptance), 16, acceptance=acceptance, **options)
    assert_definition(Run(), jobs, shapes, functools.partial(deepest, **numbers))


def test_processors_act_along_each_path() -> None:
    """Bad words and a bias are in p before a draft is held against it."""

    def process(row: np.ndarray, history: list[int]) -> np.ndarray:
        row = row.copy()
        row[2] += 0.3
        if history[-1] % 2 == 0:
            row[5] = -np.inf
        return row

    options: dict[str, Any] = {
        "acceptance": "rejection", "logit_bias": {2: 0.3},
        "bad_words": [[even, 5] for even in range(0, VOCAB, 2)],
    }  # fmt: skip
    jobs, shapes = make_jobs(random.Random(8), 16, **options)
    near = 0
    for job, shape, got in zip(jobs, shapes, Run().texts(jobs, shapes), strict=True):
        law, seed = law_of(job), job.options["seed"]
        want, margin = definition(
            job.prompt, job.max_tokens, seed, shape,
            lambda d, s, at, law=law, seed=seed: rejection(d, s, law, seed, at), law, process,
        )  # fmt: skip
        near += got != want
        assert got == want or margin < 1e-5
    assert near <= 1


def test_the_same_seed_gives_the_same_text_alone_and_in_a_crowd() -> None:
    jobs, shapes = make_jobs(random.Random(5), 12, acceptance="rejection")
    together = Run().texts(jobs, shapes)
    backwards = Run(page_size=2).texts(jobs[::-1], shapes[::-1])[::-1]
    alone = [Run().texts([job], [shape])[0] for job, shape in zip(jobs, shapes, strict=True)]
    assert together == backwards == alone


@pytest.mark.parametrize("acceptance", ["rejection", "typical", "threshold"])
def test_greedy_requests_are_greedy_under_every_rule(acceptance: str) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(8)] for _ in range(6)]
    jobs = [Job(p, 20, {"seed": 1, "acceptance": acceptance}) for p in prompts]
    shapes: list[Any] = [SHAPES[i % len(SHAPES)] for i in range(6)]
    assert Run().texts(jobs, shapes) == [FUNCTION.reference(p, 20) for p in prompts]


@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_drafts_without_probabilities_make_rejection_the_plain_draw(method: str) -> None:
    """Token for token: the draw that plain sampling makes decides about such drafts."""
    options: dict[str, Any] = {"method": method}
    if method == "ngram":
        options["ngram"] = {"max_draft_len": 4, "max_matching_ngram_size": 2}
    else:
        options["lookahead"] = (4, 3, 4)
    for engine_options in ({"method": "none"}, options):
        engine = hash_engine(FUNCTION, max_batch_size=4, **engine_options)
        jobs = [
            Job([i, 7, 8, 7, 8], 40, {"temperature": 0.1, "seed": i, "acceptance": "rejection"})
            for i in range(6)
        ]
        texts = [d.tokens for d in engine.run(jobs)]
        if engine_options["method"] == "none":
            plain = texts
    assert texts == plain
    assert engine.ex.stats()["num_accepted_tokens"] > 10


def start(**options: Any) -> tuple[Any, int]:
    engine = hash_engine(FUNCTION, method="proposed")
    rid = engine.ex.submit([1, 2], max_tokens=9, temperature=1.0, **options)
    engine.step()
    return engine, rid


def test_a_refused_proposal_leaves_none_and_harms_nobody() -> None:
    engine, rid = start(acceptance="rejection")
    good = np.full((1, VOCAB), 1 / VOCAB, np.float32)
    engine.ex.propose(rid, [3], [-1], good)
    with pytest.raises(ValueError, match=r"probs\[0\] sums to"):
        engine.ex.propose(rid, [3], [-1], good * 3)
    plan = engine.ex.plan()
    assert plan.num_rows == 1
    engine.ex.commit(plan, engine.model.forward(plan))
    engine.ex.propose(rid, [3], None, good)
    assert engine.ex.stats()["draft_prob_bytes"] >= good.nbytes
    plan = engine.ex.plan()
    assert plan.num_rows == 2
    good[:] = np.nan  # the executor has its own copy
    assert engine.ex.commit(plan, engine.model.forward(plan))[0].error is None


def test_drafts_for_the_next_step_may_come_while_one_is_in_flight() -> None:
    """The step in flight keeps the distributions of its own drafts."""
    texts = []
    for early in (False, True):
        engine, rid = start(acceptance="rejection", seed=4)
        text: list[int] = []
        for step in range(4):
            row = np.zeros((1, VOCAB), np.float32)
            row[0, step] = 1.0
            if not early or step == 0:
                engine.ex.propose(rid, [step], None, row)
            plan = engine.ex.plan()
            if early:
                row = np.roll(row, 1)
                engine.ex.propose(rid, [step + 1], None, row)
            for out in engine.ex.commit(plan, engine.model.forward(plan)):
                text += out.tokens
        texts.append(text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"acceptance": "best"}, "acceptance = 'best'"),
        ({"acceptance": "typical", "posterior_threshold": 0.0}, "posterior_threshold = 0"),
        ({"acceptance": "typical", "posterior_alpha": 1.5}, "posterior_alpha = 1.5"),
        ({"acceptance": "threshold", "acceptance_threshold": 0.0}, "acceptance_threshold = 0"),
        ({"acceptance": "threshold", "acceptance_threshold": np.nan}, "acceptance_threshold = nan"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    engine = hash_engine(FUNCTION, method="proposed")
    with pytest.raises(ValueError, match=text):
        engine.ex.submit([1], max_tokens=2, temperature=1.0, **options)
    assert engine.ex.num_unfinished == 0
