"""The pipeline of an engine that runs ahead: executor, model and stream of its place."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...config.engine import SchedulerConfig
from ...config.limits import MAX_DRAFT_LEN
from ...drafters.draft_target.device_apart import OwnDevice
from ...errors import ConfigError
from ...log import logger
from ...models.device_decoder import EXACT_DRAFT_DEPTH
from ...models.device_model import DeviceModel
from ..draft_device import own_device_of
from ..executor import make_executor
from ..kv_pages import KvPages
from ..memory_plan import MemoryPlan
from . import (
    MAX_STEP_TOKENS,
    CudaGraphRecorder,
    CudaStream,
    DeviceForward,
    GraphMemoryError,
    GraphRecorder,
    HostForward,
    ImmediateStream,
    OverlapPipeline,
    Stream,
)
from .ranked_graphs import RankedRecorder
from .recorded_passes import RecordedPasses

if TYPE_CHECKING:
    from ...drafters.slot_drafter import SlotDrafter
    from ...models.kv_storage import LayerPool
    from ...models.place import Place
    from ..host_pool import HostPool

__all__ = [
    "device_bytes",
    "graph_bytes",
    "make_own_device",
    "make_pass_timer",
    "make_pipeline",
    "make_stream",
    "record_graphs",
]

# What the driver takes in one piece.
_GRAPH_SLACK = 64 << 20


def _max_choices(executor: Any) -> int:
    """Rows of a step whose scores are needed, at most: one of a prompt, or those of a request, and
    what the host reads."""
    staging = executor.staging_layout
    rows = staging.requests * executor.max_rows_per_request + executor.max_host_rows
    return min(int(staging.rows), int(rows))


def device_bytes(
    memory: MemoryPlan,
    scheduler: SchedulerConfig,
    drafting: Mapping[str, Any],
    vocab_size: int,
    hidden_bytes: int = 0,
) -> int:
    """What enqueued steps keep on the device besides the model and the pages: mostly the slots,
    and the scores of one step.

    hidden_bytes  of the hidden state that a drafter needs of each request
    memory        a plan whose sizes of steps are final; its pages are not looked at
    """
    sizes = make_executor(1, memory, scheduler, drafting)
    # One state is kept for the next drafts; where the host chooses, those of all rows until it has.
    kept = hidden_bytes * (1 + MAX_STEP_TOKENS)
    slots = (int(sizes.slot_layout.slot_bytes) + kept) * memory.max_batch_size
    words = int(sizes.staging_layout.words + sizes.result_words) + 3  # ends of prefix sums
    per_row, per_request = 11, 4 + 3 * MAX_STEP_TOKENS + 4  # int32 words of the step's arrays
    words += per_row * memory.max_num_tokens + per_request * memory.max_batch_size
    rows = _max_choices(sizes) + int(sizes.max_host_rows)
    rates = 8 * MAX_STEP_TOKENS  # of synthetic acceptance, at most
    return slots + 4 * (words + rows * vocab_size) + rates


def make_stream(place: Place, model: Any = None) -> Stream:
    """model  whose steps are enqueued: one of several ranks has the host look after the others"""
    if place.device.type != "cuda":
        return ImmediateStream()
    ranks = model.decoder.ranks if isinstance(model, DeviceModel) else None
    return CudaStream(place.device, None if ranks is None else ranks.watch)


def make_own_device(place: Place, home: Place) -> OwnDevice | None:
    """What a draft model at `place` has beside the target at `home`; None: they are the same."""
    return None if place == home else OwnDevice(place, home, make_stream(place))


def make_recorder(stream: Stream, scheduler: SchedulerConfig, model: Any) -> GraphRecorder | None:
    """None: steps are launched one by one."""
    if scheduler.enforce_eager is True or not isinstance(stream, CudaStream):
        return None
    if not isinstance(model, DeviceModel):  # it reads values
        return None
    recorder, ranks = CudaGraphRecorder(stream), model.decoder.ranks
    if ranks is None:
        return recorder
    # No several GPUs have recorded a step yet: it has to be asked for.
    return None if scheduler.enforce_eager == "auto" else RankedRecorder(recorder, ranks)


def make_pass_timer(
    model: Any, scheduler: SchedulerConfig, place: Place
) -> Callable[[Any], float] | None:
    """What times passes of steps that are recorded; None: they are launched one by one."""
    stream = make_stream(place)
    if make_recorder(stream, scheduler, model) is None or model.decoder.ranks is not None:
        return None
    assert isinstance(stream, CudaStream)
    return RecordedPasses(model, stream)


def graph_bytes(
    model: Any,
    memory: MemoryPlan,
    scheduler: SchedulerConfig,
    place: Place,
    drafting: Mapping[str, Any],
    drafter: SlotDrafter | None = None,
    *,
    synthetic_rates: Sequence[float] = (),
) -> tuple[int, int]:
    """Device memory that an engine's graphs keep, and of a drafter's own device. A few are recorded
    over a pool of one page, which a step without requests leaves alone, and dropped again: pages
    are sized with what they say of all.

    memory  a plan whose sizes of steps are final; its pages are not looked at

    Raises ConfigError when there is not even room for the graphs.
    """
    if make_recorder(make_stream(place), scheduler, model) is None:
        return 0, 0
    one = tuple((layers, 1) for layers in memory.narrow_layers)
    pages = KvPages(model, 1, memory.tokens_per_block, place, one)
    model.bind_cache(*pages.tensors, *([pages.narrow] if one else []))
    owner: Any = drafter
    apart = own_device_of(owner)
    if hasattr(owner, "pages_of"):
        where = place if apart is None else apart.place
        own = KvPages(owner.pages_of, 1, memory.tokens_per_block, where)
        owner.bind_cache(*own.tensors)
    probe = dataclasses.replace(memory, num_pages=1, narrow_pages=(1,) * len(one))
    try:
        pipeline = make_pipeline(
            model, pages.tensors, probe, scheduler, place, drafting,
            drafter=drafter, synthetic_rates=synthetic_rates, narrow=pages.narrow,
        )  # fmt: skip
        measured = pipeline.measure_graphs()
        pipeline.stream.record().wait()
    except (torch.OutOfMemoryError, GraphMemoryError) as error:
        # The words of a GraphMemoryError are of an engine that goes on.
        why = error.__cause__ if isinstance(error, GraphMemoryError) else error
        raise ConfigError(
            "SchedulerConfig.enforce_eager: recording the steps of "
            f"max_batch_size = {memory.max_batch_size} needs more memory than is free beside the "
            f"model ({why}); lower max_batch_size, or set enforce_eager=True"
        ) from None
    there = 0 if apart is None else apart.forget()
    del pipeline
    gc.collect()  # operations and what they were recorded from name each other
    return measured, there


def make_pipeline(
    model: Any,
    pages: tuple[torch.Tensor, torch.Tensor],
    memory: MemoryPlan,
    scheduler: SchedulerConfig,
    place: Place,
    drafting: Mapping[str, Any],
    *,
    drafter: SlotDrafter | None = None,
    adaptive: bool = False,
    enable_block_reuse: bool = False,
    synthetic_rates: Sequence[float] = (),
    narrow: Sequence[LayerPool] = (),
    host_pool: HostPool | None = None,
    host_bytes_per_second: float | None = None,
) -> OverlapPipeline:
    """drafting   the executor's keywords for how drafts are made
    drafter    proposes the drafts, where `drafting` says that they come from outside
    adaptive   draft budgets follow what was accepted
    enable_block_reuse  requests start from published pages
    synthetic_rates     of synthetic acceptance; (): acceptance is real
    narrow     the model's pools of narrow windows
    host_pool  of what preempted requests held, and how fast pages are copied there; None: measured
    """
    stream = make_stream(place, model)
    if host_pool is not None and host_bytes_per_second is None:
        stream.follow()  # the pages' zeros
        host_bytes_per_second = host_pool.bytes_per_second(stream)
    recorder = make_recorder(stream, scheduler, model)
    owner: Any = drafter
    own = own_device_of(owner)
    own_recorder = None
    if own is not None and scheduler.enforce_eager is False:  # as for several ranks
        own_recorder = make_recorder(own.stream, scheduler, owner.model)
    is_exact = isinstance(model, DeviceModel) and model.numerics == "exact"
    executor = make_executor(
        model.vocab_size,
        memory,
        scheduler,
        drafting,
        adaptive=adaptive,
        pads_rows=isinstance(model, DeviceModel),
        max_draft_depth=EXACT_DRAFT_DEPTH if is_exact else MAX_DRAFT_LEN,
        enable_block_reuse=enable_block_reuse,
        synthetic_acceptance_rates=list(synthetic_rates),
        host_bytes_per_second=host_bytes_per_second or 0.0,
    )
    forward: HostForward | DeviceForward
    if isinstance(model, DeviceModel):
        forward = DeviceForward(model.decoder, _max_choices(executor))
    else:
        forward = HostForward(
            model,
            executor,
            page_size=memory.tokens_per_block,
            num_pages=memory.num_pages,
            keeps_hidden=drafter is not None and drafter.needs_hidden,
        )
    return OverlapPipeline(
        executor,
        forward,
        *pages,
        stream=stream,
        backend=place.backend,
        recorder=recorder,
        own_recorder=own_recorder,
        drafter=drafter,
        synthetic_rates=synthetic_rates,
        narrow=narrow,
        host_pool=host_pool,
    )


def record_graphs(pipeline: OverlapPipeline, memory: MemoryPlan) -> None:
    """Record the pipeline's largest step, if steps are recorded and there is memory for it; the
    others find its memory and are recorded when they are first needed.

    Raises ConfigError where the pages leave no room for the steps themselves.
    """
    try:
        pipeline.record_largest()
    except GraphMemoryError as error:
        logger.warning("%s", error)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"KvCacheConfig.free_gpu_memory_fraction: beside the K/V pages no memory is left for "
            f"steps of max_batch_size = {memory.max_batch_size} ({error}); lower one of them"
        ) from None
    if pipeline.graph_bytes > memory.graph_bytes + _GRAPH_SLACK:
        logger.warning(
            "CUDA graphs took %d bytes, %d were measured before the K/V pages were sized; leave "
            "more room with KvCacheConfig.free_gpu_memory_fraction",
            pipeline.graph_bytes,
            memory.graph_bytes,
        )
