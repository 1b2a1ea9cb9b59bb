"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from specdec_ext.engine import build
from specdec_ext.engine.overlap.worker import Worker


@pytest.fixture
def on_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too, steps are enqueued on a stream where overlap_depth is a number: the row of
    operations that a device runs, one after another over the CPU's buffers."""

    monkeypatch.setattr(
        build.EngineBuilder, "_on_stream", property(lambda b: b._scheduler.run_ahead is not None)
    )
    # In the calling thread, where a recorder of torch's operations sees them.
    monkeypatch.setattr(Worker, "run", lambda self, call: call())
