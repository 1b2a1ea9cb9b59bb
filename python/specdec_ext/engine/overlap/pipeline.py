"""The loop that keeps a few steps in flight on a stream, and their times."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specdec_ext.engine.overlap.buffers import StepBuffers
from specdec_ext.engine.overlap.operations import Operations, StepForward
from specdec_ext.engine.overlap.recorded_steps import RecordedSteps
from specdec_ext.engine.overlap.step_sizes import StepSizes
from specdec_ext.engine.overlap.step_times import PARTS, StepTimes
from specdec_ext.engine.overlap.worker import Worker
from specdec_ext.errors import EngineError
from specdec_ext.log import logger

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_ext.drafters.slot_drafter import SlotDrafter
    from specdec_ext.engine.host_pool import HostPool
    from specdec_ext.engine.overlap.graphs import GraphRecorder
    from specdec_ext.engine.overlap.streams import Event, Mark, Stream
    from specdec_ext.models.kv_storage import LayerPool

__all__ = ["OverlapPipeline"]


class OverlapPipeline(RecordedSteps):
    """Enqueues steps and delivers what they brought, at most `executor.overlap_depth` steps later.

    executor  _core.Executor
    forward   a model: called on the stream with StepTensors, writes `sampled` or returns scores
    k_pages, v_pages  [layers, P, G, S, K], the model's
    backend   name of the operations' backend; None: by the pages' device
    recorder  steps without prompts are recorded and replayed; None: nothing is (enforce_eager)
    own_recorder  the same for what a drafter does on a device of its own
    drafter   proposes drafts where the executor's method is "proposed"
    draft_options  what the request of an id asked of the drafter; None: nothing
    synthetic_rates  of synthetic acceptance; (): acceptance is real
    narrow    the model's pools of narrow windows
    host_pool  what preempted requests held; None: the executor was made without pages for it
    process   what callers make of the scores that the host reads of a step: called with the step's
              index and its rows [n, V], which stay as they are; returns others (None: the same),
              error messages by id and masks by id. None: nothing
    """

    draft_options: Callable[[int], Mapping[str, Any]] | None = None
    process: (
        Callable[[int, Tensor], tuple[Tensor | None, dict[int, str], dict[int, Any]]] | None
    ) = None

    def __init__(
        self,
        executor: Any,
        forward: StepForward,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        stream: Stream,
        backend: str | None = None,
        recorder: GraphRecorder | None = None,
        own_recorder: GraphRecorder | None = None,
        drafter: SlotDrafter | None = None,
        synthetic_rates: Sequence[float] = (),
        narrow: Sequence[LayerPool] = (),
        host_pool: HostPool | None = None,
    ) -> None:
        self._host_pool = host_pool
        buffers = StepBuffers(executor, k_pages.device, synthetic_rates)
        super().__init__(
            executor, stream, buffers, forward, k_pages, v_pages, backend, drafter, narrow, recorder
        )
        stream.follow()  # weights, pages and buffers are there when the first operation runs
        if self._own_device is not None:
            self._own_device.stream.follow()
            self._own_device.follow(stream, own_recorder)
        # By index, the steps that were enqueued and not read, oldest first: the event after each
        # and, of one that is timed, whether it reads prompts, and its marks.
        self._events: dict[int, tuple[Event, tuple[bool, list[Mark]] | None]] = {}
        self._broken: dict[int, BaseException] = {}  # why a step was not enqueued as a whole
        self._enqueued = -1  # the index of the last step that was begun
        self._worker = Worker()
        self._marks: list[Mark] | None = None  # of the step that is being enqueued
        self._times: StepTimes | None = None
        self._not_host_s = 0.0
        self._draft_seconds = 0.0  # of a step or of a draft, lately
        self.drafting_s = 0.0  # time in the drafter, where steps run as they are enqueued

    @property
    def times(self) -> StepTimes | None:
        """Sums since time_steps(); None: nobody asked."""
        return self._times

    def time_steps(self) -> None:
        """Begin to take the time of steps, from zero: marks between their parts, which are read
        when the step is delivered. Nothing waits for them; a recorded step is replayed in three
        pieces. Steps in flight do not count."""
        self._times = StepTimes()

    def step(self) -> list[Any] | None:
        """Enqueue a step if there is one, then read the one that is due.

        Returns StepOutputs, [] while nothing is due; None: nothing runs and nothing is in flight.
        An exception while a step is enqueued ends that step's requests. After an interrupt
        recover() comes first.
        """
        if self._times is None:
            return self._step()[0]
        begin, self._not_host_s = time.perf_counter(), 0.0
        outputs, reads_prompts = self._step()
        self._times.add_host(reads_prompts, time.perf_counter() - begin - self._not_host_s)
        return outputs

    def _step(self) -> tuple[list[Any] | None, bool]:
        """What step() returns, and whether it enqueued prompts."""
        planned = (
            self.executor.stage() if len(self._events) <= self.executor.overlap_depth else None
        )
        if planned is None and not self._events:
            return None, False
        outputs: list[Any] = []
        if planned is not None:
            self._worker.run(partial(self._enqueue_once, planned))
            outputs += self._fail_broken()
        if planned is None or len(self._events) > self.executor.overlap_depth:
            outputs += self._deliver()
        return outputs, planned is not None and planned.num_prompts > 0

    def recover(self) -> None:
        """Go on where an interrupt ended step(): afterwards every step in flight is enqueued, and
        the executor's outputs() are all there."""
        flying = self.executor.steps_in_flight
        newest = self.executor.newest()
        if newest.index in flying:  # if it was enqueued, or is just now, nothing is done
            self._worker.run(partial(self._enqueue_once, newest))
        for index in [i for i in self._events if i not in flying]:
            del self._events[index]  # it was delivered
        self._fail_broken()

    def _deliver(self) -> list[Any]:
        begin = time.perf_counter()
        index, (event, timed) = next(iter(self._events.items()))
        event.wait()
        self._not_host_s += time.perf_counter() - begin
        scores: Tensor | None = None
        errors: dict[int, str] = {}
        masks: dict[int, Any] = {}
        count = self.executor.oldest_host_rows
        if count and self.process is not None:
            rows = self.buffers.score_ring[self.executor.oldest_ring, :count]
            scores, errors, masks = self.process(index, rows)
        outputs = self.executor.deliver(scores, errors, masks)
        del self._events[index]
        if timed is not None and self._times is not None:
            self._times.add_step(*timed)
        return list(outputs)

    def drain(self) -> None:
        """Read the steps in flight of requests that have all ended: their pages return."""
        while self._events:
            self._deliver()
        if self._own_device is not None:  # it may still read prompts that nobody waits for
            self._own_device.stream.record().wait()

    def _fail_broken(self) -> list[Any]:
        """End the requests of steps that were not enqueued as a whole.

        Raises EngineError where a rank is lost: no step can run."""
        outputs: list[Any] = []
        for index, error in list(self._broken.items()):
            if isinstance(error, EngineError):
                raise error
            while index in self._events and next(iter(self._events)) != index:
                outputs += self._deliver()  # what earlier steps decided stands
            message = f"forward pass failed: {type(error).__name__}: {error}"
            logger.error(message, exc_info=error)
            outputs += self.executor.fail_step(index, message)
            del self._broken[index]
        return outputs

    def _enqueue_once(self, planned: Any) -> None:
        """Enqueue the step, unless that was done; where it fails, remember why."""
        if planned.index <= self._enqueued:
            return
        self._enqueued = planned.index
        try:
            self._enqueue(planned)
        except BaseException as error:
            self._broken[planned.index] = error
        whole = self._marks is not None and len(self._marks) == len(PARTS) + 1
        timed = (planned.num_prompts > 0, self._marks or []) if whole else None
        self._events[planned.index] = (self.stream.record(), timed)

    def _enqueue(self, planned: Any) -> None:
        self._marks = None if self._times is None else []
        self._mark()
        self._stage(planned)
        geometry = StepSizes.of(planned)
        self._run(geometry)
        self._tell_draft_cost(geometry)
        self._read_back(planned)
        self._mark()
        if self._marks is not None and self.stream.immediate:
            self._not_host_s += self._marks[-1].since(self._marks[0])

    def _tell_draft_cost(self, g: StepSizes) -> None:
        """Where a step has run when it was enqueued, the executor learns what drafting takes."""
        if not self.stream.immediate or self.draft_calls == 0:
            return
        seconds, self.draft_calls, self.draft_s = self.draft_s, 0, 0.0
        self.drafting_s += seconds
        if not g.drafts:
            return
        new = seconds / self._draft_units(g)
        old = self._draft_seconds
        # One step in which the machine did something else counts as twice what is usual.
        self._draft_seconds = 0.9 * old + 0.1 * min(new, 2 * old) if old else new
        self._set_draft_cost(self._draft_seconds)

    def _draft_units(self, g: StepSizes) -> int:
        """What the drafter's time is proportional to: drafts of a request, or 1."""
        one_by_one = getattr(self.drafter, "drafts_one_by_one", False)
        rows = min(g.max_rows, self.executor.max_rows_per_request)  # not a prompt's
        return max(rows - 1, 1) if one_by_one else 1

    def _set_draft_cost(self, seconds: float) -> None:
        one_by_one = getattr(self.drafter, "drafts_one_by_one", False)
        self.executor.set_draft_cost(*((0.0, seconds) if one_by_one else (seconds, 0.0)))

    def _mark(self) -> None:
        if self._marks is not None:
            self._marks.append(self.stream.mark())

    def _stage(self, planned: Any) -> None:
        stream, buffers = self.stream, self.buffers
        for copy in planned.page_orders:
            assert self._host_pool is not None
            self._host_pool.copy(stream, *copy)
        self._forward.copied(planned.page_orders)
        # What only prompts need lies at the end.
        all_words = planned.num_prompts or planned.moves
        words = buffers.staging.words if all_words else buffers.staging.prompt_tokens
        stream.copy(buffers.staged[:words], buffers.staging_ring[planned.ring, :words])
        for entry in planned.entries:
            source = buffers.entry_ring[planned.ring, entry.offset : entry.offset + entry.bytes]
            stream.copy(buffers.slots[entry.slot, entry.at : entry.at + entry.bytes], source)
            if self.drafter is not None and entry.enters:
                asked = self.draft_options
                options = asked(entry.request_id) if asked is not None else {}
                stream.enqueue(partial(self.drafter.enter, entry.slot, options))

    def _read_back(self, planned: Any) -> None:
        buffers, count = self.buffers, sum(c.count for c in planned.host_choices)
        count += sum(tree.rows for tree in planned.host_trees)
        self.stream.copy(buffers.result_ring[planned.ring], buffers.result_block)
        if count:
            self.stream.copy(buffers.score_ring[planned.ring, :count], buffers.host_scores[:count])
        for i, tree in enumerate(planned.host_trees):
            self.stream.copy(buffers.tree_ring[planned.ring, i], buffers.tree_of(tree.slot))

    def _run(self, g: StepSizes) -> None:
        """Everything between the copies."""
        parts: tuple[Operations, ...]
        bucket = self._bucket(g)
        replays = None if bucket is None else self._graphs(bucket, g, self._marks is not None)
        if replays is None:
            ahead, parts = self._operations(g)
        else:
            ahead, parts = (), tuple((replay,) for replay in replays)
            if self._own_device is not None and bucket is not None:
                ahead = self._operations(self._bucket_sizes(bucket, g.needs_scores, g.drafts))[0]
        for operation in ahead:
            self.stream.enqueue(operation)
        for index, operations in enumerate(parts):
            if index:
                self._mark()
            for operation in operations:
                self.stream.enqueue(operation)

    def measure_drafting(self, repeats: int = 5) -> float | None:
        """Tell the executor what drafting takes for one request, with nothing in flight. Waits for
        the device. Where steps run as they are enqueued they tell it themselves.

        Returns the median, in seconds; None: nothing was measured.
        """
        if self.drafter is None or self.stream.immediate:
            return None
        rows = self.executor.max_rows_per_request
        capacity = self.buffers.staging.pages_per_request * self._page_size
        g = StepSizes(0, 1, 0, rows, 0, rows, capacity, False, recorded=True)
        tensors = self._tensors(g)

        def draft() -> None:
            self._propose_drafts(g, tensors)

        with self._for_nobody():
            self.stream.enqueue(draft)
            drafting = draft
            recorded = self._recorder is not None and self._own_device is None
            if recorded and self._has_room:
                assert self._recorder is not None
                with contextlib.suppress(torch.OutOfMemoryError):  # takes longer one by one
                    drafting = self._recorder.record((draft,))
            self.stream.enqueue(drafting)
            marks = [self.stream.mark()]
            for _ in range(repeats):
                self.stream.enqueue(drafting)
                marks.append(self.stream.mark())
        self.stream.record().wait()
        pairs = itertools.pairwise(marks)
        seconds = statistics.median(later.since(earlier) for earlier, later in pairs)
        self._set_draft_cost(seconds / self._draft_units(g))
        return seconds
