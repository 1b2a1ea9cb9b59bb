"""Recorded steps of several ranks: which packets say that something is recorded, and what another
rank makes of them. The graphs themselves need GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec_ext.engine.device_share import DeviceShare
from specdec_ext.engine.overlap.ranked_graphs import RankedRecorder
from specdec_ext.models.place import CPU
from specdec_ext.parallel.team import FORWARD, MOVES, RECORD, RECORDED, REPLAY


class Recorder:
    """Runs what it records, as capturing does."""

    memory_bytes = 7

    def __init__(self, said: list[Any]) -> None:
        self.said = said

    def record(self, operations: Sequence[Callable[[], None]]) -> Callable[[], None]:
        for operation in operations:
            operation()
        return lambda: self.said.append("replayed")


class Ranks:
    """DeviceRanks as far as packets go."""

    before_packet: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.said: list[Any] = []

    def tell(self, kind: int, *words: int) -> None:
        self.said.append((kind, *words))

    def step(self, kind: int) -> None:
        """What tell_step() and tell_moves() do."""
        if (call := self.before_packet) is not None:
            self.before_packet = None
            call()
        self.said.append((kind,))


def test_what_rank_0_says() -> None:
    ranks = Ranks()
    recorder = RankedRecorder(Recorder(ranks.said), ranks)  # type: ignore[arg-type]
    whole = recorder.record((lambda: ranks.step(FORWARD), lambda: ranks.step(MOVES)))
    drafting = recorder.record((lambda: None,))
    accepting = recorder.record((lambda: ranks.step(MOVES),))
    ranks.step(FORWARD)  # not recorded
    assert ranks.said == [
        (RECORD, 0), (FORWARD,), (MOVES,), (RECORDED, 1),
        (RECORD, 1), (MOVES,), (RECORDED, 1), (FORWARD,),
    ]  # fmt: skip
    ranks.said.clear()
    for replay in (whole, drafting, accepting):
        replay()
    assert ranks.said == [(REPLAY, 0), "replayed", "replayed", (REPLAY, 1), "replayed"]
    assert recorder.memory_bytes == 7


def test_a_recording_that_fails() -> None:
    ranks = Ranks()
    recorder = RankedRecorder(Recorder(ranks.said), ranks)  # type: ignore[arg-type]

    def fails() -> None:
        ranks.step(FORWARD)
        raise MemoryError

    with pytest.raises(MemoryError):
        recorder.record((fails,))
    recorder.record((lambda: ranks.step(FORWARD),))
    assert ranks.said == [
        (RECORD, 0), (FORWARD,), (RECORDED, 0), (RECORD, 0), (FORWARD,), (RECORDED, 1)
    ]  # fmt: skip
    assert ranks.before_packet is None


def test_what_another_rank_records() -> None:
    """Its share of the packets between RECORD and RECORDED, while rank 0 records its own."""
    coming: list[tuple[int, np.ndarray]] = []
    ranks = SimpleNamespace(hear=lambda: coming.pop(0))
    model = SimpleNamespace(decoder=SimpleNamespace(ranks=ranks))
    share: Any = DeviceShare(model, CPU)  # type: ignore[arg-type]
    ran: list[Any] = []
    share._step = lambda words: ran.append(("step", *words))
    share._move = lambda words: ran.append(("moves", *words))
    share._make_recorder = lambda: Recorder(ran)

    def words(*numbers: int) -> np.ndarray:
        return np.array(numbers, dtype=np.int32)

    coming += [(FORWARD, words(5)), (MOVES, words(6)), (RECORDED, words(1))]
    share.do(RECORD, words(0))
    coming += [(FORWARD, words(7)), (RECORDED, words(0))]  # rank 0's device had no room
    share.do(RECORD, words(1))
    assert not coming and ran == [("step", 5), ("moves", 6), ("step", 7)]
    share.do(REPLAY, words(0))
    assert ran[3:] == ["replayed"]
    with pytest.raises(KeyError):
        share.do(REPLAY, words(1))
