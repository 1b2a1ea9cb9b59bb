"""Memory of the device runs out while steps are recorded: a message, and the engine goes on."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_driver import FakeRecorder, StreamEngine, stream_hash_engine

from hash_target import HashFunction
from specdec_ext import ConfigError
from specdec_ext.engine.overlap import Bucket, CudaGraphRecorder, GraphMemoryError
from specdec_ext.engine.overlap import build as overlap_build

REMEDIES = r"free_gpu_memory_fraction.*max_batch_size.*enforce_eager=True"
FUNCTION = HashFunction(vocab=30, seed=1)


class SmallDevice(FakeRecorder):
    """Has memory for `room` records, or for `replays` first replays."""

    def __init__(self, room: int, replays: int = 1000) -> None:
        super().__init__()
        self.room, self.replays, self.refused = room, replays, 0

    def record(self, operations: Sequence[Callable[[], object]]) -> Callable[[], None]:
        if self.recorded == self.room:
            self.refused += 1
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        replay = super().record(operations)

        def limited() -> None:
            if self.replayed == self.replays:
                raise torch.OutOfMemoryError("no room to launch it")
            replay()

        return limited


def engine_of(recorder: FakeRecorder, **options: Any) -> StreamEngine:
    return stream_hash_engine(
        FUNCTION, max_batch_size=3, max_seq_len=120, max_num_tokens=40, recorder=recorder,
        method="lookahead", lookahead=(4, 3, 4), **options,
    )  # fmt: skip


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the package warned of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("specdec_ext").addHandler(handler)
    yield said
    logging.getLogger("specdec_ext").removeHandler(handler)


@pytest.mark.parametrize(
    ("room", "timed"), [(0, False), (1, False), (2, False), (0, True), (1, True), (4, True)]
)
def test_requests_go_on_without_the_step_that_found_no_room(
    room: int, timed: bool, warnings: list[str]
) -> None:
    """A step is recorded when it is first needed, in three parts while it is timed."""
    recorder = SmallDevice(room)
    engine = engine_of(recorder, depth=1, stub=7)
    if timed:
        engine.pipeline.time_steps()
    prompts = ([1, 2, 3], [4, 5], [6])
    rids = [engine.submit(list(prompts[0]), max_tokens=50)]
    outputs = [out for _ in range(6) for out in engine.step() or []]
    rids += [engine.submit(list(prompt), max_tokens=30) for prompt in prompts[1:]]
    outputs += engine.drain()
    for rid, prompt, count in zip(rids, prompts, (50, 30, 30), strict=True):
        tokens = [t for out in outputs if out.request_id == rid for t in out.tokens]
        assert tokens == FUNCTION.reference(list(prompt), count)
    assert recorder.recorded == room and recorder.refused == 1
    assert (recorder.replayed > 0) == (room >= (3 if timed else 1))
    (message,) = warnings
    assert message.startswith("CUDA graphs: the device's memory ran out while a step of")
    assert "2 GiB" in message and f"{room} graphs are there" in message
    assert re.search(REMEDIES, message)


@pytest.mark.parametrize(("room", "replays"), [(3, 1000), (1000, 3)])
def test_measuring_graphs_ends_where_memory_does(room: int, replays: int) -> None:
    """The largest comes first; one that was recorded and cannot be launched does not count."""
    recorder = SmallDevice(room, replays)
    engine = engine_of(recorder, depth=1)
    assert len(engine.pipeline.buckets) > 3
    with pytest.raises(GraphMemoryError, match=REMEDIES) as raised:
        engine.pipeline.measure_graphs()
    assert "3 graphs are there" in str(raised.value)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert engine.pipeline.num_graphs == 3
    largest = engine.pipeline.buckets[-1]
    assert [key[:2] for key in engine.pipeline._replays] == [
        (largest, True), (largest, False), (Bucket(1, 1), False)
    ]  # fmt: skip
    recorded, recorder.replays = recorder.recorded, 1000
    rid = engine.submit([1, 2], max_tokens=20)
    tokens = [t for out in engine.drain() if out.request_id == rid for t in out.tokens]
    assert tokens == FUNCTION.reference([1, 2], 20)
    assert recorder.recorded == recorded


def test_drafting_is_timed_without_a_graph_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(SmallDevice(0), depth=1, stub=3)
    pipeline = engine.pipeline
    monkeypatch.setattr(pipeline, "drafter", object())
    drafted: list[int] = []
    monkeypatch.setattr(pipeline, "_propose_drafts", lambda *_: drafted.append(1))
    assert pipeline.measure_drafting(repeats=3) is not None
    pipeline.stream.record().wait()
    assert len(drafted) == 1 + 1 + 3


def test_no_room_for_a_step_itself_is_a_configuration_error() -> None:
    """Before a step is recorded it runs once: without a graph there is no room for it, either."""

    def record_largest() -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    pipeline: Any = SimpleNamespace(record_largest=record_largest)
    memory: Any = SimpleNamespace(max_batch_size=3)
    with pytest.raises(ConfigError, match=r"free_gpu_memory_fraction.*max_batch_size = 3.*3 GiB"):
        overlap_build.record_graphs(pipeline, memory)


# -- torch's captures ------------------------------------------------------------------------------


class FakeCuda:
    """What CudaGraphRecorder uses of torch.cuda. `ends`, `replays`: what these raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "default"
        self.ends: Exception | None = None
        self.replays: Exception | None = None
        for name in ("graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=self.replay))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 2 << 30))

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, *, stream: str, **_: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            if self.ends is not None:  # as torch's: the stream stays the current one
                raise self.ends
            self.current = before

    def replay(self) -> None:
        if self.replays is not None:
            raise self.replays


def recorder_of() -> CudaGraphRecorder:
    stream: Any = SimpleNamespace(stream=SimpleNamespace(device="cuda:0"))
    return CudaGraphRecorder(stream)


INVALID = RuntimeError("CUDA error: operation failed due to a previous error during capture")
DRIVERS = RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("in_operation", "at_end"),
    [
        (torch.OutOfMemoryError("tried to allocate"), None),
        (torch.OutOfMemoryError("tried to allocate"), INVALID),
        (None, DRIVERS),  # while the graph is made
    ],
)
def test_a_capture_says_that_memory_ran_out(
    in_operation: Exception | None, at_end: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = recorder_of()

    def operation() -> None:
        if in_operation is not None:
            raise in_operation

    cuda.ends = at_end
    with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate|out of memory"):
        recorder.record([operation])
    assert cuda.current == "default" and recorder.memory_bytes == 0
    in_operation, cuda.ends = None, None
    recorder.record([operation])()  # another one that fits


def test_a_first_replay_says_that_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    replay = recorder_of().record([])
    cuda.replays = DRIVERS
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        replay()


def test_other_errors_of_a_capture_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = recorder_of()
    cuda.ends = INVALID
    with pytest.raises(RuntimeError) as raised:
        recorder.record([])
    assert raised.value is INVALID and not isinstance(raised.value, torch.OutOfMemoryError)
