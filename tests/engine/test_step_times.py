"""Where a step's time goes: measured through the seams that a GPU fills."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from method_cases import GREEDY, Folders, Where, open_llm, texts_of
from stream_driver import FakeRecorder, StreamEngine, stream_hash_engine

from hash_target import HashFunction

FUNCTION = HashFunction(vocab=30, seed=4)


def engine_of(**options: Any) -> StreamEngine:
    return stream_hash_engine(
        FUNCTION, max_batch_size=3, max_seq_len=120, max_num_tokens=40, **options,
        method="lookahead", lookahead=(4, 3, 4),
    )  # fmt: skip


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_parts_are_told_apart_and_nobody_waits_for_them(depth: int, graphs: bool) -> None:
    """On the stub stream every operation takes one unit, and a mark that is read too early fails
    the test. The model is one operation, acceptance one, the copy of results two."""
    recorder = FakeRecorder() if graphs else None
    engine = engine_of(depth=depth, stub=11 + depth, recorder=recorder)
    engine.submit([1, 2, 3], max_tokens=9)
    engine.drain()
    assert engine.pipeline.times is None
    steps = engine.stats()["steps"]
    engine.pipeline.time_steps()
    engine.submit(list(range(30)) * 3, max_tokens=25)  # three chunks
    engine.submit([5, 6], max_tokens=25)
    outputs = engine.drain()
    times = engine.pipeline.times
    assert times is not None
    assert times.decode.steps + times.prefill.steps == engine.stats()["steps"] - steps
    assert times.prefill.steps == 3 and times.decode.steps > 5
    for sums in (times.prefill, times.decode):
        assert sums.verify == sums.steps
        assert sums.accept == 3 * sums.steps
        # Two pieces of the staged step, and drafting and geometry; recording adds steps of nobody.
        assert sums.draft >= (3 if graphs and sums is times.decode else 4) * sums.steps
        assert sums.host > 0
    assert [t for out in outputs if out.request_id == 3 for t in out.tokens] == FUNCTION.reference(
        [5, 6], 25
    )
    if recorder is not None:
        assert recorder.replayed >= 3 * times.decode.steps


def test_on_the_cpu_parts_are_taken_by_its_clock() -> None:
    engine = engine_of(depth=1)
    forward = engine.model.forward

    def slow(plan: Any) -> torch.Tensor:
        time.sleep(0.003)
        return forward(plan)

    engine.model.forward = slow
    engine.pipeline.time_steps()
    engine.submit([1, 2, 3], max_tokens=30)
    begin = time.perf_counter()
    engine.drain()
    whole = time.perf_counter() - begin
    times = engine.pipeline.times
    assert times is not None
    sums = [times.decode, times.prefill]
    count = sum(s.steps for s in sums)
    assert sum(s.verify for s in sums) >= 0.003 * (count - engine.stats()["empty_steps"])
    parts = sum(s.draft + s.verify + s.accept for s in sums)
    host = sum(s.host for s in sums)
    assert 0 < host < whole - 0.003 * (count - 1)
    assert parts + host <= whole


def test_a_step_that_failed_is_not_counted() -> None:
    engine = engine_of(depth=1)
    forward, calls = engine.model.forward, iter(range(1000))

    def fails_once(plan: Any) -> torch.Tensor:
        if next(calls) == 4:
            raise RuntimeError("out of luck")
        return forward(plan)

    engine.model.forward = fails_once
    engine.pipeline.time_steps()
    engine.submit([1, 2, 3], max_tokens=30)
    engine.submit([4], max_tokens=30)
    engine.drain()
    engine.submit([4], max_tokens=5)
    engine.drain()
    times = engine.pipeline.times
    assert times is not None
    assert times.decode.steps + times.prefill.steps == engine.stats()["steps"] - 1
    engine.assert_idle()


def test_steps_in_flight_when_timing_begins_do_not_count() -> None:
    engine = engine_of(depth=2, stub=3)
    engine.submit([1, 2, 3], max_tokens=30)
    for _ in range(4):
        engine.step()
    flying = engine.stats()["in_flight"]
    before = engine.stats()["steps"]
    assert flying == 2
    engine.pipeline.time_steps()
    engine.drain()
    times = engine.pipeline.times
    assert times is not None
    assert times.decode.steps == engine.stats()["steps"] - before - flying


def test_an_engine_reports_them(models: Folders, plain_texts: dict[str, list[list[int]]]) -> None:
    with open_llm(models, "lookahead", Where("stream", 1)) as llm:
        assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        about = llm.get_metrics()["overlap"]
        assert about == {"depth": 1, "num_graphs": 0, "graph_bytes": 0, "step_times": None}
        llm.engine.time_steps()  # type: ignore[attr-defined]
        assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        sums = llm.get_metrics()["overlap"]["step_times"]
        assert set(sums) == {"decode", "prefill"}
        for kind in sums.values():
            assert set(kind) == {"steps", "draft", "verify", "accept", "host"}
            assert all(value > 0 for value in kind.values())
    with open_llm(models, "lookahead") as llm:
        assert "overlap_depth" not in llm.get_metrics()
