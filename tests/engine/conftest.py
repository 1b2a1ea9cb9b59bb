"""Fixtures of the engine's tests."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_ext.engine import build
from specdec_ext.engine.overlap.worker import Worker


@pytest.fixture
def on_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too, steps are enqueued on a stream where overlap_depth is a number: the row of
    operations that a device runs, one after another over the CPU's buffers."""

    def enqueued(place: Any, scheduler: Any, config: Any) -> bool:
        return scheduler.run_ahead is not None

    monkeypatch.setattr(build, "steps_are_enqueued", enqueued)
    # In the calling thread, where a recorder of torch's operations sees them.
    monkeypatch.setattr(Worker, "run", lambda self, call: call())
