"""Run-ahead: step t + 1 is enqueued before step t has been read (docs/overlap.md).

The C++ executor keeps the books (``_core.Executor``); this package owns what needs a
stream: the tensors of a step, the order of its operations, events.
"""

from __future__ import annotations

from specdec_ext._core import MAX_STEP_TOKENS
from specdec_ext.engine.overlap.buffers import StepBuffers, StepTensors
from specdec_ext.engine.overlap.forwards import DeviceForward, HostForward
from specdec_ext.engine.overlap.graphs import (
    Bucket,
    CudaGraphRecorder,
    GraphMemoryError,
    GraphRecorder,
    choose_bucket,
    make_buckets,
)
from specdec_ext.engine.overlap.pipeline import OverlapPipeline
from specdec_ext.engine.overlap.step_times import PARTS, StepTimes
from specdec_ext.engine.overlap.streams import CudaStream, Event, ImmediateStream, Mark, Stream

__all__ = [
    "MAX_STEP_TOKENS",
    "PARTS",
    "Bucket",
    "CudaGraphRecorder",
    "CudaStream",
    "DeviceForward",
    "Event",
    "GraphMemoryError",
    "GraphRecorder",
    "HostForward",
    "ImmediateStream",
    "Mark",
    "OverlapPipeline",
    "StepBuffers",
    "StepTensors",
    "StepTimes",
    "Stream",
    "choose_bucket",
    "make_buckets",
]
