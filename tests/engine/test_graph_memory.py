"""Pages are sized by what recorded steps leave; what a recording must not meet."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from method_cases import GREEDY, Folders, Where, on_devices, open_llm, pipeline_of, texts_of

from specdec_ext import ConfigError
from specdec_ext.engine import build as engine_build
from specdec_ext.engine import model_memory
from specdec_ext.engine.memory_plan import plan_memory
from specdec_ext.engine.overlap import build as overlap_build
from specdec_ext.engine.overlap.graphs import _nothing_collected
from specdec_ext.models.place import Place

EACH = 1000


class Keeps:
    """Records like FakeRecorder; every record takes memory. `log`: what happened in which order.

    error  of every record behind the first `room`
    """

    def __init__(self, log: list[str], error: Exception | None = None, room: int = 0) -> None:
        self.memory_bytes = 0
        self._log, self._error, self._room = log, error, room

    def record(self, operations: Sequence[Callable[[], None]]) -> Callable[[], None]:
        if self._error is not None and self._log.count("record") >= self._room:
            raise self._error
        self._log.append("record")
        self.memory_bytes += EACH

        def replay() -> None:
            for operation in operations:
                operation()

        return replay


def open_with_graphs(
    monkeypatch: pytest.MonkeyPatch,
    models: Folders,
    where: Where,
    log: list[str],
    *,
    available: int = 8_000_000,
    eager: bool = False,
    error: Exception | None = None,
    room: int = 0,
) -> Any:
    def make_recorder(stream: Any, scheduler: Any, model: Any) -> Keeps | None:
        return None if scheduler.enforce_eager else Keeps(log, error, room)

    make_pages = engine_build.EngineBuilder._make_pages

    def logged(self: Any, model: Any, num_pages: int, *narrow: Any) -> Any:
        log.append(f"{num_pages} pages")
        return make_pages(self, model, num_pages, *narrow)

    def planned(**sizes: Any) -> Any:
        log.append(f"{sizes['free_bytes']} free")
        return plan_memory(**sizes)

    scheduler = {"max_num_tokens": 48, "enforce_eager": eager}
    with monkeypatch.context() as patched:
        patched.setattr(overlap_build, "make_recorder", make_recorder)
        patched.setattr(model_memory, "plan_memory", planned)
        patched.setattr(engine_build.EngineBuilder, "_make_pages", logged)
        patched.setattr(model_memory, "available_memory_bytes", lambda: available)
        patched.setattr(Place, "free_bytes", lambda self: None)  # a device has no other memory
        return open_llm(
            models, "lookahead", where, scheduler=scheduler,
            kv_cache_config={"tokens_per_block": 16, "free_gpu_memory_fraction": 0.5},
        )  # fmt: skip


@on_devices
def test_pages_are_sized_by_what_graphs_leave(
    monkeypatch: pytest.MonkeyPatch, models: Folders, where: Where
) -> None:
    log: list[str] = []
    with open_with_graphs(monkeypatch, models, where, log, eager=True) as llm:
        wanted = texts_of(llm, GREEDY)
    taken = 8_000_000 - int(log[-2].split()[0])  # by what else is there
    with open_with_graphs(
        monkeypatch, models, where, log, eager=True, available=taken + 100_000
    ) as llm:
        eager = llm.memory
    assert log[-2:] == ["100000 free", f"{eager.num_pages} pages"] and eager.graph_bytes == 0
    log.clear()
    with open_with_graphs(monkeypatch, models, where, log, available=taken + 100_000) as llm:
        memory = llm.memory
        about = llm.get_metrics()
        before = log.count("record")
        assert texts_of(llm, GREEDY) == wanted
        used = llm.get_metrics()["overlap"]["num_graphs"]
        buckets = pipeline_of(llm).buckets
    at = log[: log.index(f"{memory.num_pages} pages")].count("record")
    every = 2 * len(buckets)  # with scores and without
    assert f"{100_000 - every * EACH} free" in log
    # A few to measure all, the largest over the pages, the others when they are needed.
    assert at == 4 < every and before == at + 1
    assert 1 < used < every and log.count("record") == at + used
    assert memory.graph_bytes == every * EACH == about["memory"]["graph_bytes"]
    assert about["overlap"]["graph_bytes"] == EACH and about["overlap"]["num_graphs"] == 1
    page = memory.tokens_per_block * memory.bytes_per_token
    lost = (eager.num_pages - memory.num_pages) * page
    assert abs(lost - 0.5 * memory.graph_bytes) <= page


@on_devices
def test_no_room_for_graphs_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, models: Folders, where: Where
) -> None:
    error = torch.OutOfMemoryError("tried to allocate 2 GiB")
    with pytest.raises(
        ConfigError, match=r"max_batch_size = 3 needs more memory.*2 GiB.*eager=True"
    ):
        open_with_graphs(monkeypatch, models, where, [], error=error)


@on_devices
def test_no_room_beside_the_pages_leaves_steps_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
    models: Folders,
    where: Where,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Since pages were sized, another program has taken what the graphs were measured to need."""
    log: list[str] = []
    package = logging.getLogger("specdec_ext")
    monkeypatch.setattr(package, "handlers", [caplog.handler])
    monkeypatch.setattr(package, "propagate", False)
    with open_with_graphs(monkeypatch, models, where, log) as llm:
        wanted = texts_of(llm, GREEDY)
        count = llm.get_metrics()["overlap"]["num_graphs"]
    assert log.count("record") == 4 + count and count > 2 and not caplog.records
    log.clear()
    error = torch.OutOfMemoryError("tried to allocate 2 GiB")
    with open_with_graphs(monkeypatch, models, where, log, error=error, room=4 + 2) as llm:
        assert texts_of(llm, GREEDY) == wanted
        assert llm.get_metrics()["overlap"]["num_graphs"] == 2
    (said,) = (record.getMessage() for record in caplog.records)
    assert "2 graphs are there, other steps are launched one by one" in said and "2 GiB" in said


class Cycle:
    """Only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def make_garbage(count: int = 20_000) -> None:
    for _ in range(count):
        Cycle()


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(50, 1, 1)
    yield
    gc.set_threshold(*before)


def test_nothing_is_collected_while_a_step_is_recorded(eager_collector: None) -> None:
    with pytest.raises(ValueError, match="midway"), _nothing_collected():
        gone = weakref.ref(Cycle())
        make_garbage()
        assert gone() is not None
        raise ValueError("midway")
    make_garbage()
    assert gone() is None
    gc.disable()
    try:
        with _nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
