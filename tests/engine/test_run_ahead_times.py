"""Where a step's time goes, and what graphs keep: measured through the seams that a GPU fills."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ahead_driver import FakeRecorder, RunAheadEngine, run_ahead_hash_engine
from test_run_ahead import METHODS
from test_run_ahead_llm import GREEDY, PROMPTS, VOCAB, open_llm, tokens_of

from emulators import devices
from hash_target import HashFunction
from specdec_ext import ConfigError, LookaheadDecodingConfig
from specdec_ext.engine import build as engine_build
from specdec_ext.engine import models as engine_models
from specdec_ext.engine.memory_plan import plan_memory
from specdec_ext.engine.overlap import build as overlap_build
from tiny_models import save_llama

pytestmark = pytest.mark.usefixtures("on_stream")

FUNCTION = HashFunction(vocab=30, seed=4)
LOOKAHEAD = LookaheadDecodingConfig(4, 3, 4, adaptive=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("times") / "target", 11, VOCAB)


def engine_of(**options: Any) -> RunAheadEngine:
    return run_ahead_hash_engine(
        FUNCTION, max_batch_size=3, max_seq_len=120, max_num_tokens=40, **options,
        **METHODS["lookahead"],
    )  # fmt: skip


# -- times ----------------------------------------------------------------------------------------


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


def test_an_engine_reports_them(folder: Path) -> None:
    with open_llm(folder, LOOKAHEAD, 1) as llm:
        wanted = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        about = llm.get_metrics()["run_ahead"]
        assert about == {"depth": 1, "num_graphs": 0, "graph_bytes": 0, "step_times": None}
        llm.engine.time_steps()  # type: ignore[attr-defined]
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
        sums = llm.get_metrics()["run_ahead"]["step_times"]
        assert set(sums) == {"decode", "prefill"}
        for kind in sums.values():
            assert set(kind) == {"steps", "draft", "verify", "accept", "host"}
            assert all(value > 0 for value in kind.values())
    with open_llm(folder, LOOKAHEAD, None) as llm:
        assert "run_ahead" not in llm.get_metrics()


# -- memory of graphs -----------------------------------------------------------------------------

EACH = 1000


class Keeps:
    """Records like FakeRecorder; every record takes memory. `log`: what happened in which order."""

    def __init__(self, log: list[str], error: Exception | None = None) -> None:
        self.memory_bytes = 0
        self._log, self._error = log, error

    def record(self, operations: Sequence[Callable[[], None]]) -> Callable[[], None]:
        if self._error is not None:
            raise self._error
        self._log.append("record")
        self.memory_bytes += EACH

        def replay() -> None:
            for operation in operations:
                operation()

        return replay


def open_with_graphs(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    device: str,
    log: list[str],
    *,
    available: int = 8_000_000,
    eager: bool = False,
    error: Exception | None = None,
) -> Any:
    def make_recorder(stream: Any, scheduler: Any, model: Any) -> Keeps | None:
        return None if scheduler.enforce_eager else Keeps(log, error)

    make_pages = engine_build.EngineBuilder._make_pages

    def logged(self: Any, model: Any, num_pages: int) -> Any:
        log.append(f"{num_pages} pages")
        return make_pages(self, model, num_pages)

    def planned(**sizes: Any) -> Any:
        log.append(f"{sizes['free_bytes']} free")
        return plan_memory(**sizes)

    scheduler = {"max_batch_size": 3, "max_seq_len": 96, "max_num_tokens": 48, "run_ahead": 1,
                 "enforce_eager": eager}  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(overlap_build, "make_recorder", make_recorder)
        patched.setattr(engine_models, "plan_memory", planned)
        patched.setattr(engine_build.EngineBuilder, "_make_pages", logged)
        patched.setattr(engine_models, "available_memory_bytes", lambda: available)
        return open_llm(
            folder, LOOKAHEAD, 1, device=device, scheduler_config=scheduler,
            kv_cache_config={"tokens_per_block": 16, "free_gpu_memory_fraction": 0.5},
        )  # fmt: skip


@devices
def test_pages_are_sized_by_what_graphs_leave(
    monkeypatch: pytest.MonkeyPatch, folder: Path, device: str
) -> None:
    log: list[str] = []
    with open_with_graphs(monkeypatch, folder, device, log, eager=True) as llm:
        wanted = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    taken = 8_000_000 - int(log[-2].split()[0])  # by what else is there
    with open_with_graphs(
        monkeypatch, folder, device, log, eager=True, available=taken + 100_000
    ) as llm:
        eager = llm.memory
    assert log[-2:] == ["100000 free", f"{eager.num_pages} pages"] and eager.graph_bytes == 0
    log.clear()
    with open_with_graphs(monkeypatch, folder, device, log, available=taken + 100_000) as llm:
        memory = llm.memory
        about = llm.get_metrics()
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
    count = log.count("record")
    at = log[: log.index(f"{memory.num_pages} pages")].count("record")
    assert f"{100_000 - at * EACH} free" in log
    # All of them once to measure, once over the pages that were sized with that.
    assert count == 2 * at and count > 4
    assert memory.graph_bytes == at * EACH == about["memory"]["graph_bytes"]
    assert about["run_ahead"]["graph_bytes"] == memory.graph_bytes
    assert about["run_ahead"]["num_graphs"] == at
    page = memory.tokens_per_block * memory.bytes_per_token
    lost = (eager.num_pages - memory.num_pages) * page
    assert abs(lost - 0.5 * memory.graph_bytes) <= page


@devices
def test_no_room_for_graphs_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, folder: Path, device: str
) -> None:
    error = torch.OutOfMemoryError("tried to allocate 2 GiB")
    with pytest.raises(
        ConfigError, match=r"max_batch_size = 3 needs more memory.*2 GiB.*eager=True"
    ):
        open_with_graphs(monkeypatch, folder, device, [], error=error)
