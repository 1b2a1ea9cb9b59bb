"""Run-ahead: step t + 1 is enqueued before step t has been read (docs/run_ahead.md).

The C++ executor keeps the books (``_core.RunAheadExecutor``); this package owns what needs a
stream: the tensors of a step, the order of its operations, events.
"""

from __future__ import annotations

from specdec_ext.run_ahead.buffers import MAX_STEP_TOKENS, StepBuffers, StepTensors
from specdec_ext.run_ahead.forwards import PlanModel, RowsModel
from specdec_ext.run_ahead.graphs import (
    Bucket,
    CudaGraphRecorder,
    GraphRecorder,
    choose_bucket,
    make_buckets,
)
from specdec_ext.run_ahead.pipeline import RunAheadPipeline
from specdec_ext.run_ahead.step_times import PARTS, StepTimes
from specdec_ext.run_ahead.streams import CudaStream, Event, ImmediateStream, Mark, Stream

__all__ = [
    "MAX_STEP_TOKENS",
    "PARTS",
    "Bucket",
    "CudaGraphRecorder",
    "CudaStream",
    "Event",
    "GraphRecorder",
    "ImmediateStream",
    "Mark",
    "PlanModel",
    "RowsModel",
    "RunAheadPipeline",
    "StepBuffers",
    "StepTensors",
    "StepTimes",
    "Stream",
    "choose_bucket",
    "make_buckets",
]
