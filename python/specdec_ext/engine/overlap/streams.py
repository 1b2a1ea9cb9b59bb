"""Where a step's operations run: a queue that the host fills and does not wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CudaStream", "Event", "ImmediateStream", "Mark", "Stream"]


_POLL_S = 20e-6


class Event(Protocol):
    """A point of a stream."""

    def done(self) -> bool:
        """Has everything before it run? Does not wait."""
        ...

    def wait(self) -> None:
        """Return when it has."""
        ...


class Mark(Protocol):
    """A point of a stream whose time is known once it has been reached."""

    def since(self, earlier: Any) -> float:
        """Seconds from an earlier mark of the stream; both have been reached."""
        ...


class Stream(Protocol):
    """Operations run in the order in which they were enqueued, at any time after that.

    immediate  they have run when enqueue() returns, in the calling thread
    """

    immediate: bool

    def enqueue(self, operation: Callable[[], object]) -> None:
        """Run `operation`, which touches the device's tensors only and reads no value of theirs."""
        ...

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy between the host's memory and the device's. Neither side may be touched by the host
        before an event behind the copy, except that a source may be read."""
        ...

    def record(self) -> Event:
        """An event after everything that was enqueued so far."""
        ...

    def mark(self) -> Mark:
        """A mark after everything that was enqueued so far; nobody waits for it."""
        ...

    def follow(self) -> None:
        """What is enqueued from now on runs after what the caller gave the device directly."""
        ...

    def wait_for(self, other: Any) -> None:
        """What is enqueued from now on runs after what `other`, a stream of another device, was
        given so far. The host does not wait."""
        ...


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class _Clock:
    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def since(self, earlier: _Clock) -> float:
        return self.seconds - earlier.seconds


class ImmediateStream:
    """The CPU: whatever is enqueued has run when the call returns."""

    immediate = True

    def enqueue(self, operation: Callable[[], object]) -> None:
        operation()

    def copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source)

    def record(self) -> Event:
        return _Done()

    def mark(self) -> Mark:
        return _Clock()

    def follow(self) -> None:
        return

    def wait_for(self, other: ImmediateStream) -> None:
        return


class _CudaEvent:
    """watch  called again and again while the host waits; may raise. None: it sleeps"""

    def __init__(self, event: Any, watch: Callable[[], None] | None = None) -> None:
        self._event, self._watch = event, watch

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        if self._watch is None:
            self._event.synchronize()
            return
        while not self._event.query():
            self._watch()
            time.sleep(_POLL_S)


class _CudaMark:
    def __init__(self, event: Any) -> None:
        self.event = event

    def since(self, earlier: _CudaMark) -> float:
        return float(earlier.event.elapsed_time(self.event)) * 1e-3


class CudaStream:
    """A CUDA stream of torch; the host's tensors are pinned, or a copy would wait.

    Operations are launched by the calling thread at once and run when the device comes to them.

    watch  called while the host waits for an event: the device may wait for another rank, which has
           ended. It may raise
    """

    immediate = False

    def __init__(
        self,
        device: torch.device | str | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._watch = watch

    def enqueue(self, operation: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            operation()

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return _CudaEvent(event, self._watch)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return _CudaMark(event)

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def wait_for(self, other: CudaStream) -> None:
        self.stream.wait_stream(other.stream)
