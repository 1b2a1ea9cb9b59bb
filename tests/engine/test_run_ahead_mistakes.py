"""Mistakes of a run-ahead pipeline: each is noticed by the schedules of test_run_ahead.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
from run_ahead_driver import run_ahead_hash_engine
from test_run_ahead import METHODS, expected, random_jobs

from hash_target import HashFunction
from specdec_ext.run_ahead import RunAheadPipeline, StepTensors


class ReadsTooEarly(RunAheadPipeline):
    """Delivers without waiting for the step's event."""

    def step(self) -> list[Any] | None:
        for event in self._events:
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

    def _commit(self, tensors: StepTensors) -> None:
        pages, self._pages = self._pages, tuple(p.clone() for p in self._pages)  # type: ignore[assignment]
        super()._commit(tensors)
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
