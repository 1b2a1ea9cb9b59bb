"""The pipeline of an engine that runs ahead: executor, model and stream of its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import _core
from .config import SchedulerConfig
from .memory_plan import MemoryPlan
from .run_ahead import (
    CudaGraphRecorder,
    CudaStream,
    ImmediateStream,
    PlanModel,
    RowsModel,
    RunAheadPipeline,
    Stream,
)

if TYPE_CHECKING:
    import torch

    from .models.place import Place

__all__ = ["make_pipeline"]


def make_pipeline(
    model: Any,
    pages: tuple[torch.Tensor, torch.Tensor],
    memory: MemoryPlan,
    scheduler: SchedulerConfig,
    place: Place,
    drafting: Mapping[str, Any],
) -> RunAheadPipeline:
    """scheduler  run_ahead is set
    drafting   the executor's keywords for how drafts are made
    """
    executor = _core.RunAheadExecutor(
        vocab_size=model.vocab_size,
        max_batch_size=memory.max_batch_size,
        max_seq_len=memory.max_seq_len,
        max_num_tokens=memory.max_num_tokens,
        num_pages=memory.num_pages,
        page_size=memory.tokens_per_block,
        depth=scheduler.run_ahead or 0,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        **drafting,
    )
    forward: PlanModel | RowsModel
    if place.is_cpu:
        forward = PlanModel(
            model, executor, page_size=memory.tokens_per_block, num_pages=memory.num_pages
        )
    else:
        forward = RowsModel(model.decoder)
    stream: Stream = ImmediateStream()
    recorder = None
    if place.device.type == "cuda":
        stream = cuda = CudaStream(place.device)
        recorder = None if scheduler.enforce_eager else CudaGraphRecorder(cuda)
    pipeline = RunAheadPipeline(
        executor, forward, *pages, stream=stream, backend=place.backend, recorder=recorder
    )
    pipeline.record_graphs()
    return pipeline
