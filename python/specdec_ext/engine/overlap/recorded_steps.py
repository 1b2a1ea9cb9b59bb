"""Steps without prompts, recorded once and replayed: which, when, and while memory lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specdec_ext.engine.overlap.graphs import (
    Bucket,
    GraphMemoryError,
    choose_bucket,
    make_buckets,
)
from specdec_ext.engine.overlap.operations import StepForward, StepOperations
from specdec_ext.engine.overlap.step_sizes import StepSizes
from specdec_ext.engine.overlap.step_times import PARTS
from specdec_ext.log import logger

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_ext.drafters.slot_drafter import SlotDrafter
    from specdec_ext.engine.overlap.buffers import StepBuffers
    from specdec_ext.engine.overlap.graphs import GraphRecorder
    from specdec_ext.engine.overlap.streams import Stream
    from specdec_ext.models.kv_storage import LayerPool

__all__ = ["RecordedSteps"]


class RecordedSteps(StepOperations):
    """The graphs of steps. One is of a bucket: it serves every step that is no larger.

    executor  _core.Executor
    stream    where steps are enqueued
    recorder  None: nothing is recorded, and there are no buckets
    """

    def __init__(
        self,
        executor: Any,
        stream: Stream,
        buffers: StepBuffers,
        forward: StepForward,
        k_pages: Tensor,
        v_pages: Tensor,
        backend: str | None,
        drafter: SlotDrafter | None,
        narrow: Sequence[LayerPool],
        recorder: GraphRecorder | None,
    ) -> None:
        super().__init__(buffers, forward, k_pages, v_pages, backend, drafter, narrow)
        self.executor, self.stream = executor, stream
        self._recorder = recorder
        self._has_room = True  # for more recorded steps
        self._replays: dict[tuple[Bucket, bool, bool, int | None], Callable[[], None]] = {}
        self._chosen: dict[tuple[int, int], Bucket | None] = {}
        self.buckets: tuple[Bucket, ...] = ()
        if recorder is not None:
            staging = buffers.staging
            self.buckets = make_buckets(
                staging.requests, executor.max_rows_per_request, staging.rows
            )

    def record_largest(self) -> None:
        """Record the largest step and replay it once without any request, before the first step:
        its pool's memory serves the others, which are recorded when they are first needed.

        Raises GraphMemoryError where memory runs out: what was recorded until then is replayed, all
        other steps are launched one by one.
        """
        if self.buckets:
            self._record_and_replay(self.buckets[-1], needs_scores=True)

    def measure_graphs(self) -> int:
        """Record the largest step and a few others, without any request.

        Returns the memory that all would keep: beyond the pool, which the largest one sizes, each
        takes what the driver keeps of its kernels, as many in every one.
        Raises GraphMemoryError as record_largest() does.
        """
        if not self.buckets:
            return 0
        self.record_largest()
        first = self.graph_bytes
        sample = (self.buckets[-1], self.buckets[0], self.buckets[len(self.buckets) // 2])
        for bucket in sample:
            self._record_and_replay(bucket, needs_scores=False)
        more = self.graph_bytes - first
        num_more = self.num_graphs - 1  # of few buckets, two may be one
        variants = 2 * (1 if self.drafter is None else 2)
        rest = variants * len(self.buckets) - 1
        return first + -(-more * rest // num_more)

    def _record_and_replay(self, bucket: Bucket, *, needs_scores: bool) -> None:
        replay = self._graph(bucket, needs_scores, drafts=True)
        try:
            self.stream.enqueue(replay)
        except torch.OutOfMemoryError as error:
            self._replays.popitem()
            raise self._stop_recording(bucket, error) from error

    def _stop_recording(self, bucket: Bucket, error: Exception) -> GraphMemoryError:
        """Returns what there is to say about it."""
        self._has_room = False
        return GraphMemoryError(
            f"CUDA graphs: the device's memory ran out while a step of {bucket.requests} requests "
            f"and {bucket.rows} rows was recorded ({error}); {self.num_graphs} graphs are there, "
            "other steps are launched one by one. Leave more room with a smaller "
            "KvCacheConfig.free_gpu_memory_fraction, record fewer sizes with a smaller "
            "SchedulerConfig.max_batch_size, or set enforce_eager=True"
        )

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    @property
    def graph_bytes(self) -> int:
        """Memory of the device that the recorded steps keep."""
        return 0 if self._recorder is None else self._recorder.memory_bytes

    def _bucket(self, g: StepSizes) -> Bucket | None:
        """The smallest that a step fits into; None: it is launched one by one."""
        if not self.buckets or g.prompts or g.needs_host:
            return None
        size = (g.decodes, g.decode_rows)
        if size not in self._chosen:
            self._chosen[size] = choose_bucket(self.buckets, *size)
        return self._chosen[size]

    def _graphs(
        self, bucket: Bucket, g: StepSizes, in_parts: bool
    ) -> list[Callable[[], None]] | None:
        """The recorded step, whole or in PARTS; None: it is not, nor can be."""
        parts = range(len(PARTS)) if in_parts else (None,)
        keys = [(bucket, g.needs_scores, g.drafts or self.drafter is None, i) for i in parts]
        if not self._has_room and not all(key in self._replays for key in keys):
            return None
        try:
            return [self._graph(*key) for key in keys]
        except GraphMemoryError as error:
            logger.warning("%s", error)
            return None

    def _graph(
        self, bucket: Bucket, needs_scores: bool, drafts: bool, part: int | None = None
    ) -> Callable[[], None]:
        """The recorded step of a bucket: one for greedy steps and one for steps that sample, and
        of each one for steps in which nobody drafts, if there is a drafter that they spare. Its
        operations and their arguments depend on nothing else.

        It runs once before it is recorded, without any request, which changes no slot and no page.
        part  index of PARTS; None: the whole step

        Raises GraphMemoryError where there is no room to record it.
        """
        drafts = drafts or self.drafter is None
        key = (bucket, needs_scores, drafts, part)
        if key not in self._replays:
            assert self._recorder is not None
            ahead, parts = self._operations(self._bucket_sizes(bucket, needs_scores, drafts))
            every = tuple(operation for operations in parts for operation in operations)
            with self._for_nobody():
                for operation in (*ahead, *ahead, *every):  # the second time it is recorded
                    self.stream.enqueue(operation)
            recorded = every if part is None else parts[part]
            try:
                self._replays[key] = self._recorder.record(recorded)
            except torch.OutOfMemoryError as error:
                raise self._stop_recording(bucket, error) from error
        return self._replays[key]

    def _bucket_sizes(self, bucket: Bucket, needs_scores: bool, drafts: bool) -> StepSizes:
        capacity = self.buffers.staging.pages_per_request * self._page_size
        rows = self.executor.max_rows_per_request
        return StepSizes.of_bucket(bucket, rows, capacity, needs_scores, drafts)

    @contextlib.contextmanager
    def _for_nobody(self) -> Iterator[None]:
        """What is enqueued meanwhile finds slot -1 in every place of the step."""
        buffers = self.buffers
        staged = buffers.staged
        saved: list[Tensor] = []
        # Made on the stream that uses it: its memory goes back to that stream, behind the last use.
        self.stream.enqueue(lambda: saved.append(staged.clone()))
        for offset in (buffers.staging.slot_ids, buffers.staging.commit_ids):
            ids = buffers.staged_part(offset, buffers.staging.requests)
            self.stream.enqueue(partial(ids.fill_, -1))
        yield
        self.stream.enqueue(lambda: staged.copy_(saved[0]))
