"""The pipeline of an engine that runs ahead: executor, model and stream of its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import _core
from .config import SchedulerConfig
from .errors import ConfigError
from .memory_plan import MemoryPlan
from .models.device_model import DeviceModel
from .run_ahead import (
    MAX_STEP_TOKENS,
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

__all__ = ["device_bytes", "make_pipeline"]


def _make_executor(
    vocab_size: int,
    memory: MemoryPlan,
    scheduler: SchedulerConfig,
    drafting: Mapping[str, Any],
    **options: Any,
) -> Any:
    return _core.RunAheadExecutor(
        vocab_size=vocab_size,
        max_batch_size=memory.max_batch_size,
        max_seq_len=memory.max_seq_len,
        max_num_tokens=memory.max_num_tokens,
        num_pages=memory.num_pages,
        page_size=memory.tokens_per_block,
        depth=scheduler.run_ahead or 0,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        **drafting,
        **options,
    )


def _max_choices(executor: Any) -> int:
    """Rows of a step whose scores are needed, at most: one of a prompt, or those of a request."""
    staging = executor.staging_layout
    return min(int(staging.rows), int(staging.requests * executor.max_rows_per_request))


def device_bytes(
    memory: MemoryPlan, scheduler: SchedulerConfig, drafting: Mapping[str, Any], vocab_size: int
) -> int:
    """What run-ahead keeps on the device beside the model and the pages: mostly the slots, and the
    scores of one step.

    memory  a plan whose sizes of steps are final; its pages are not looked at
    """
    if scheduler.run_ahead is None:
        return 0
    sizes = _make_executor(1, memory, scheduler, drafting)
    slots = int(sizes.slot_layout.slot_bytes) * memory.max_batch_size
    words = int(sizes.staging_layout.words + sizes.result_words) + 3  # ends of prefix sums
    per_row, per_request = 11, 4 + 3 * MAX_STEP_TOKENS + 4  # int32 words of the step's arrays
    words += per_row * memory.max_num_tokens + per_request * memory.max_batch_size
    rows = _max_choices(sizes) + int(sizes.max_host_rows)
    return slots + 4 * (words + rows * vocab_size)


def make_pipeline(
    model: Any,
    pages: tuple[torch.Tensor, torch.Tensor],
    memory: MemoryPlan,
    scheduler: SchedulerConfig,
    place: Place,
    drafting: Mapping[str, Any],
    *,
    adaptive: bool = False,
    enable_block_reuse: bool = False,
) -> RunAheadPipeline:
    """scheduler  run_ahead is set
    drafting   the executor's keywords for how drafts are made
    adaptive   draft budgets follow what was accepted
    enable_block_reuse  requests start from published pages

    Raises ConfigError for a model that cannot run ahead where it is.
    """
    executor = _make_executor(
        model.vocab_size,
        memory,
        scheduler,
        drafting,
        adaptive=adaptive,
        pads_rows=not place.is_cpu,
        enable_block_reuse=enable_block_reuse,
    )
    forward: PlanModel | RowsModel
    if place.is_cpu:
        forward = PlanModel(
            model, executor, page_size=memory.tokens_per_block, num_pages=memory.num_pages
        )
    elif isinstance(model, DeviceModel):
        forward = RowsModel(model.decoder, _max_choices(executor))
    else:
        raise ConfigError(
            f"SchedulerConfig.run_ahead = {scheduler.run_ahead}: on {place.name} the transformers "
            "adapter takes its steps from the host; use device='cpu', or run_ahead=None"
        )
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
