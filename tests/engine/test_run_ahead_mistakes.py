"""Mistakes of a run-ahead pipeline: each is noticed by the schedules of test_run_ahead.py."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from driver import Job
from run_ahead_driver import run_ahead_hash_engine
from test_run_ahead import METHODS, expected, random_jobs
from test_run_ahead_sampled import LOSSLESS, LOSSY, alone, sampled_jobs

from hash_target import HashFunction
from specdec_ext.engine.overlap import RunAheadPipeline, StepTensors


class ReadsTooEarly(RunAheadPipeline):
    """Delivers without waiting for the step's event."""

    def step(self) -> list[Any] | None:
        for event, _ in self._events.values():
            event.wait = lambda: None  # type: ignore[method-assign]
        return super().step()


class ReadsBackFirst(RunAheadPipeline):
    """The copy of the results is enqueued before the commit that writes them."""

    def _run(self, g: Any) -> None:
        self._held = g

    def _read_back(self, planned: Any) -> None:
        super()._read_back(planned)
        super()._run(self._held)


class EntersLate(RunAheadPipeline):
    """Slots are written behind the step that begins their requests."""

    def _enqueue(self, planned: Any) -> None:
        super()._enqueue(planned)
        super()._stage(planned)

    def _stage(self, planned: Any) -> None:
        words = self.buffers.staging.words
        self.stream.copy(self.buffers.staged, self.buffers.staging_ring[planned.ring, :words])


class ForgetsCompaction(RunAheadPipeline):
    """K/V of accepted drafts stays where the tree had it."""

    def _commit(self, tensors: StepTensors, *decided: Any) -> None:
        pages, self._pages = self._pages, tuple(p.clone() for p in self._pages)  # type: ignore[assignment]
        super()._commit(tensors, *decided)
        self._pages = pages


class ForgetsPromptRows(RunAheadPipeline):
    """Rows of decoding requests are counted from the start of the step."""

    def _draft(self, g: Any, tensors: StepTensors) -> None:
        super()._draft(g, tensors)
        if g.prompts and g.decodes:
            tensors.step.cu_rows[g.prompts :] -= 1


class SharedStaging(RunAheadPipeline):
    """The step is staged from the place of the step before."""

    def _enqueue(self, planned: Any) -> None:
        ring = self.buffers.staging_ring
        for other in range(len(ring)):
            if other != planned.ring:
                ring[other] = ring[planned.ring]
        super()._enqueue(planned)


class BadPages(RunAheadPipeline):
    """A request's first page is lost on the way."""

    def _build(self, tensors: StepTensors) -> None:
        tensors.step.page_table[:, 0] = -1
        super()._build(tensors)


class LawsOfOthers(RunAheadPipeline):
    """The laws of a step's requests are staged one place off."""

    def _accept(self, g: Any, tensors: StepTensors) -> None:
        laws = self.buffers.staged_words.laws(len(tensors.step.kv_len))
        for values in (laws.temperature, laws.top_k, laws.seed):
            values.copy_(values.roll(1))
        super()._accept(g, tensors)


class RulesForgotten(RunAheadPipeline):
    """Every request is held to exact match."""

    def _accept(self, g: Any, tensors: StepTensors) -> None:
        self.buffers.staged_words.rules(len(tensors.step.kv_len))["acceptance"].zero_()
        super()._accept(g, tensors)


class ScoresOfOthers(RunAheadPipeline):
    """Rows of scores stand one place off."""

    def _timed_forward(self, tensors: StepTensors) -> None:
        super()._timed_forward(tensors)
        if self._scores is not None:
            self._scores = self._scores.roll(1, 0)


class ChoosesGreedily(RunAheadPipeline):
    """What sampled requests accept is thrown away: the commit walks the tree by best tokens."""

    def _commit(self, tensors: StepTensors, sampled: Any, accepted: Any) -> None:
        super()._commit(tensors, sampled, None)


@pytest.mark.parametrize(
    "pipeline", [LawsOfOthers, RulesForgotten, ScoresOfOthers, ChoosesGreedily]
)
def test_a_pipeline_that_samples_wrongly_is_noticed(pipeline: type[RunAheadPipeline]) -> None:
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=2)
    rng = random.Random(6)
    jobs = sampled_jobs(rng, function, "ngram", 8, LOSSLESS + LOSSY)
    jobs = [dataclasses.replace(job, cancel_step=None) for job in jobs]
    asked = {"temperature": 0.3, "seed": 5, "acceptance": "typical", "posterior_alpha": 0.9}
    jobs += [Job([3, 1, 3, 1, i], 60, asked) for i in range(3)]
    wanted = [alone(function, "ngram", job).tokens for job in jobs]
    sizes = {"max_batch_size": 3, "max_seq_len": 200, "max_num_tokens": 1024, "depth": 1}
    for kind, same in ((RunAheadPipeline, True), (pipeline, False)):
        engine = run_ahead_hash_engine(function, stub=4, pipeline=kind, **sizes, **METHODS["ngram"])
        got = engine.run(jobs, max_steps=2000)
        assert not any("AttributeError" in str(d.error) or "TypeError" in str(d.error) for d in got)
        assert ([d.tokens for d in got] == wanted) == same


@pytest.mark.parametrize(
    "pipeline",
    [
        ReadsTooEarly,
        ReadsBackFirst,
        EntersLate,
        ForgetsCompaction,
        ForgetsPromptRows,
        SharedStaging,
        BadPages,
    ],
)
def test_a_mistaken_pipeline_is_noticed(pipeline: type[RunAheadPipeline]) -> None:
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=2)
    noticed = 0
    for seed in range(3):
        rng = random.Random(seed)
        jobs = random_jobs(rng, function, "lookahead", 6, 200)
        for job in jobs:
            job.cancel_step = None
        try:
            engine = run_ahead_hash_engine(
                function, max_batch_size=3, max_seq_len=200, max_num_tokens=120, depth=1,
                stub=seed, pipeline=pipeline, **METHODS["lookahead"],
            )  # fmt: skip
            got = engine.run(jobs, max_steps=2000)
        except (AssertionError, RuntimeError, ValueError, IndexError):
            noticed += 1
            continue
        # The mistake is what it says, not a typing error of this test.
        assert not any("AttributeError" in str(d.error) or "TypeError" in str(d.error) for d in got)
        noticed += [d.tokens for d in got] != [expected(function, job)[0] for job in jobs]
    assert noticed > 0
