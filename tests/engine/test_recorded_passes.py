"""T(rows) of an engine whose steps are recorded: its passes are timed as graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from method_cases import GREEDY, Folders, Where, open_llm, texts_of

from emulators import needs_cuda
from specdec_ext.config.engine import SchedulerConfig
from specdec_ext.engine.overlap import recorded_passes
from specdec_ext.engine.overlap.build import make_pass_timer
from specdec_ext.engine.overlap.loop import OverlapLoop
from specdec_ext.engine.overlap.recorded_passes import RecordedPasses
from specdec_ext.models.device_scratch import Scratch
from specdec_ext.models.place import CPU


class Clock:
    """A stream whose marks tell the times of `seconds`, one after another."""

    def __init__(self, seconds: list[float]) -> None:
        self.log: list[str] = []
        self._marks = iter(seconds)

    def follow(self) -> None:
        self.log.append("follow")

    def enqueue(self, operation: Callable[[], object]) -> None:
        operation()

    def mark(self) -> Any:
        at = next(self._marks)
        return SimpleNamespace(at=at, since=lambda earlier: at - earlier.at)

    def record(self) -> Any:
        return SimpleNamespace(wait=lambda: self.log.append("wait"))


def test_a_pass_is_recorded_and_its_least_replay_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = Clock([1.0, 1.5, 1.75, 2.5])

    def record(operations: list[Callable[[], None]]) -> Callable[[], None]:
        stream.log.append("record")
        (operation,) = operations
        return lambda: (stream.log.append("replay"), operation())[1]

    monkeypatch.setattr(
        recorded_passes, "CudaGraphRecorder", lambda _: SimpleNamespace(record=record)
    )
    decoder = SimpleNamespace(
        forward_rows=lambda step: stream.log.append(step), greedy=lambda rows: None
    )
    model: Any = SimpleNamespace(stage=lambda plan: f"rows of {plan}", decoder=decoder)
    assert RecordedPasses(model, stream)("a plan") == 0.25
    # Once to load what it needs; one replay to have the graph there, then three that count.
    replayed = ["replay", "rows of a plan"] * 4
    assert stream.log == ["follow", "rows of a plan", "record", *replayed, "wait"]


def test_passes_are_timed_when_nothing_else_runs() -> None:
    """They have a stream of their own and the steps' buffers."""
    log: list[str] = []

    def entry(name: str, result: Any = None) -> Callable[..., Any]:
        return lambda *_: (log.append(name), result)[1]

    stream = SimpleNamespace(
        record=entry("record", SimpleNamespace(wait=entry("wait"))), follow=entry("follow")
    )
    pipeline = SimpleNamespace(
        drain=entry("drain"), measure_drafting=entry("drafting"), stream=stream
    )
    loop: Any = OverlapLoop.__new__(OverlapLoop)
    loop._pipeline, loop._calibrate = pipeline, entry("passes")
    loop.executor = SimpleNamespace(stats=lambda: {"running": 0})
    loop._wants_calibration = True
    loop._calibrate_once()
    assert log == ["drain", "record", "wait", "passes", "follow", "drafting"]


def test_scratch_that_was_outgrown_stays_where_graphs_compute() -> None:
    scratch = Scratch(torch.device("cpu"), "a kernel")
    first = scratch(1000)
    assert scratch(900) is first and first.numel() == 1256
    kept = weakref.ref(first)
    address = first.data_ptr()
    del first
    assert scratch(1001).numel() == 2 * 1256  # twice as much: all pieces together stay below that
    first = kept()
    assert first is not None and first.data_ptr() == address


def test_where_steps_are_launched_so_are_passes() -> None:
    assert make_pass_timer(object(), SchedulerConfig(), CPU) is None


@needs_cuda
def test_an_engine_with_graphs_measures_them(
    models: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[float] = []
    call = RecordedPasses.__call__

    def watched(self: RecordedPasses, plan: Any) -> float:
        timed.append(call(self, plan))
        return timed[-1]

    monkeypatch.setattr(RecordedPasses, "__call__", watched)
    for eager in (False, True):
        timed.clear()
        scheduler = {"enforce_eager": eager}
        with open_llm(models, "lookahead", Where("cuda", 1), scheduler=scheduler) as llm:
            llm.measure_step_cost()
            assert bool(timed) == (not eager) and all(0 < one < 1 for one in timed)
            texts_of(llm, GREEDY)
