"""Steps without prompts as graphs: recorded once for each bucket of sizes, then replayed.

A bucket is (request slots, rows). Everything that a recorded step's operations are launched with
follows from the bucket: what is true of a step (which requests, how many rows, which pages) lies in
the tensors, whose addresses never change. Requests and rows beyond the step's are padding: slot -1,
no rows, no page.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from specdec_ext.engine.overlap.streams import CudaStream

__all__ = [
    "Bucket",
    "CudaGraphRecorder",
    "GraphMemoryError",
    "GraphRecorder",
    "choose_bucket",
    "make_buckets",
    "memory_error",
]

# Recorded graphs keep memory: this many at most.
MAX_BUCKETS = 64
# Request counts between these are padded to the next; above, to the next multiple of the last step.
_REQUEST_COUNTS = (1, 2, 4, 8)
_REQUEST_STEP = 8
_MANY_ROWS = 24  # of a request


@dataclass(frozen=True, order=True)
class Bucket:
    """Sizes of a recorded step; ordered by what it costs."""

    rows: int
    requests: int


def make_buckets(max_requests: int, max_rows_per_request: int, max_rows: int) -> tuple[Bucket, ...]:
    """The buckets of an engine, cheapest first, at most MAX_BUCKETS.

    For each number of requests: one row each (nobody drafts), half of the drafts, all of them; of
    many drafts also a quarter.

    max_rows_per_request  the golden token and the drafts of one step
    max_rows              of a step, all requests together
    """
    step = _REQUEST_STEP
    while True:
        counts = [n for n in _REQUEST_COUNTS if n < max_requests]
        counts += range(2 * _REQUEST_STEP, max_requests, step)
        counts.append(max_requests)
        each = {1, -(-max_rows_per_request // 2), max_rows_per_request}
        if max_rows_per_request >= _MANY_ROWS:
            each.add(-(-max_rows_per_request // 4))
        buckets = {Bucket(min(n * rows, max_rows), n) for n in counts for rows in each}
        if len(buckets) <= MAX_BUCKETS:
            return tuple(sorted(buckets))
        step *= 2


def choose_bucket(buckets: Sequence[Bucket], requests: int, rows: int) -> Bucket | None:
    """The cheapest bucket that holds a step of this size; None: the step runs without a graph."""
    fitting = (b for b in buckets if b.requests >= requests and b.rows >= rows)
    return min(fitting, default=None)


class GraphMemoryError(RuntimeError):
    """The device's memory ran out while steps were recorded; none is recorded any more."""


def memory_error(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Where memory ran out, if that is why `error` was raised: the driver has no type for it, and
    ending a capture that has failed fails, too."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            return torch.OutOfMemoryError(str(error))
        error = error.__cause__ or error.__context__
    return None


class GraphRecorder(Protocol):
    """Makes graphs of what is enqueued."""

    def record(self, operations: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """A function that enqueues the work of `operations` anew; recording runs none of it.

        They have run once before, in a step of the same sizes, so that every kernel is loaded and
        all scratch memory is there.

        Raises torch.OutOfMemoryError, as the function's first call does; nothing has run then.
        """
        ...

    @property
    def memory_bytes(self) -> int:
        """Device memory that everything recorded keeps."""
        ...


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Errors that mean that memory ran out become torch's type."""
    try:
        yield
    except RuntimeError as error:
        if (found := memory_error(error)) is None or found is error:
            raise
        raise found from None


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python frees no cycles of objects meanwhile. Those of an engine that is gone have streams,
    events and page-locked memory, and giving these back may end a recording of the same thread."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class CudaGraphRecorder:
    """CUDA graphs through torch, with one memory pool for all: steps run one after another.

    memory_bytes  what recording and the first replay of each took of the device's free memory
    """

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream.stream
        self.memory_bytes = 0
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []  # nothing is freed while a graph holds it

    def record(self, operations: Sequence[Callable[[], None]]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # as capturing does: what it returns is not the graph's
        free = self._free()
        # Other threads may allocate meanwhile: only this one's calls are recorded and checked.
        # A capture that fails may leave its stream as the current one, the outer block does not.
        with (
            _memory_errors(),
            _nothing_collected(),
            torch.cuda.stream(self._stream),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            for operation in operations:
                operation()
        self._graphs.append(graph)
        self.memory_bytes += max(0, free - self._free())
        measured = False

        def replay() -> None:
            nonlocal measured
            if measured:
                graph.replay()
                return
            measured = True  # the first one may take memory of its own
            before = self._free()
            with _memory_errors():
                graph.replay()
            self.memory_bytes += max(0, before - self._free())

        return replay

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self._stream.device)[0])
