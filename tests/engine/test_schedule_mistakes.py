"""Mistakes of a pipeline: each is noticed by the random programs of schedule_machine.py."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from driver import Job, hash_engine
from schedule_machine import METHODS, Schedule, run_programs
from stream_driver import stream_hash_engine

from hash_target import HashFunction
from specdec_ext.engine.overlap import OverlapPipeline, StepTensors


class ReadsTooEarly(OverlapPipeline):
    """Delivers without waiting for the step's event."""

    def step(self) -> list[Any] | None:
        for event, _ in self._events.values():
            event.wait = lambda: None  # type: ignore[method-assign]
        return super().step()


class ReadsBackFirst(OverlapPipeline):
    """The copy of the results is enqueued before the commit that writes them."""

    def _run(self, g: Any) -> None:
        self._held = g

    def _read_back(self, planned: Any) -> None:
        super()._read_back(planned)
        super()._run(self._held)


class EntersLate(OverlapPipeline):
    """Slots are written behind the step that begins their requests."""

    def _enqueue(self, planned: Any) -> None:
        super()._enqueue(planned)
        super()._stage(planned)

    def _stage(self, planned: Any) -> None:
        words = self.buffers.staging.words
        self.stream.copy(self.buffers.staged, self.buffers.staging_ring[planned.ring, :words])


class ForgetsCompaction(OverlapPipeline):
    """K/V of accepted drafts stays where the tree had it."""

    def _commit(self, tensors: StepTensors, *decided: Any) -> None:
        pools, self._pools = self._pools, tuple((k.clone(), v.clone()) for k, v in self._pools)
        super()._commit(tensors, *decided)
        self._pools = pools


class ForgetsPromptRows(OverlapPipeline):
    """Rows of decoding requests are counted from the start of the step."""

    def _draft(self, g: Any, tensors: StepTensors) -> None:
        super()._draft(g, tensors)
        if g.prompts and g.decodes:
            tensors.step.cu_rows[g.prompts :] -= 1


class SharedStaging(OverlapPipeline):
    """The step is staged from the place of the step before."""

    def _enqueue(self, planned: Any) -> None:
        ring = self.buffers.staging_ring
        for other in range(len(ring)):
            if other != planned.ring:
                ring[other] = ring[planned.ring]
        super()._enqueue(planned)


class BadPages(OverlapPipeline):
    """A request's first page is lost on the way."""

    def _build(self, tensors: StepTensors) -> None:
        tensors.step.page_table[:, 0] = -1
        super()._build(tensors)


class LawsOfOthers(OverlapPipeline):
    """The laws of a step's requests are staged one place off."""

    def _accept(self, g: Any, tensors: StepTensors) -> None:
        laws = self.buffers.staged_words.laws(len(tensors.step.kv_len))
        for values in (laws.temperature, laws.top_k, laws.seed):
            values.copy_(values.roll(1))
        super()._accept(g, tensors)


class RulesForgotten(OverlapPipeline):
    """Every request is held to exact match."""

    def _accept(self, g: Any, tensors: StepTensors) -> None:
        self.buffers.staged_words.rules(len(tensors.step.kv_len))["acceptance"].zero_()
        super()._accept(g, tensors)


class ScoresOfOthers(OverlapPipeline):
    """Rows of scores stand one place off."""

    def _timed_forward(self, tensors: StepTensors) -> None:
        super()._timed_forward(tensors)
        if self._scores is not None:
            self._scores = self._scores.roll(1, 0)


class ChoosesGreedily(OverlapPipeline):
    """What sampled requests accept is thrown away: the commit walks the tree by best tokens."""

    def _commit(self, tensors: StepTensors, sampled: Any, accepted: Any, drafts: bool) -> None:
        super()._commit(tensors, sampled, None, drafts)


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
        LawsOfOthers,
        ScoresOfOthers,
    ],
)
def test_a_mistaken_pipeline_is_noticed(pipeline: type[OverlapPipeline]) -> None:
    sampled = pipeline in (LawsOfOthers, ScoresOfOthers)
    method = "ngram" if sampled else "lookahead"
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)) as info:
        run_programs(Schedule, 60, shrink=False, method=method, places=(1,), pipeline=pipeline)
    # The mistake is what it says, not a typing error of this test.
    assert "AttributeError" not in str(info.value) and "TypeError" not in str(info.value)


@pytest.mark.parametrize("pipeline", [OverlapPipeline, RulesForgotten, ChoosesGreedily])
def test_lossy_texts_are_the_hosts_or_the_pipeline_is_mistaken(
    pipeline: type[OverlapPipeline],
) -> None:
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=2)
    sizes = {"max_seq_len": 200, "max_num_tokens": 1024, "adaptive": False, **METHODS["ngram"]}
    asked = {"temperature": 0.3, "seed": 5, "acceptance": "typical", "posterior_alpha": 0.9}
    jobs = [Job([3, 1, 3, 1, i], 60, asked) for i in range(3)]
    wanted = [hash_engine(function, max_batch_size=1, **sizes).run([job])[0].tokens for job in jobs]
    engine = stream_hash_engine(
        function, max_batch_size=3, stub=4, pipeline=pipeline, depth=1, **sizes
    )
    got = [d.tokens for d in engine.run(jobs, max_steps=2000)]
    assert (got == wanted) == (pipeline is OverlapPipeline)


class Watching(OverlapPipeline):
    """Fails when a slot is taken while a step that named it has not been read: the host's copy of
    its tree would be read when the next one is written there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.unread: deque[set[int]] = deque()

    def _stage(self, planned: Any) -> None:
        staging = self.buffers.staging
        ring = self.buffers.staging_ring[planned.ring]
        for entry in planned.entries:
            assert all(entry.slot not in named for named in self.unread)
        self.unread.append(set(ring[staging.slot_ids :][: staging.requests].tolist()))
        super()._stage(planned)

    def _deliver(self) -> list[Any]:
        outputs = super()._deliver()
        self.unread.popleft()
        return outputs


def test_what_a_slot_brings_is_written_after_its_last_use() -> None:
    seen = run_programs(
        Schedule, 30, method="proposed", places=(0, 1, 2), pipeline=Watching, may_fail=False
    )
    assert seen["compared"] > 300
