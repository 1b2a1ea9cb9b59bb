"""A stream for tests: enqueued work runs later, as early or as late as is legal, piece by piece.

What a host must not do while work is in flight becomes visible: a copy compares its source with
what it was when it was enqueued, and the target of a copy to the host holds garbage until it ran.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

GARBAGE = -0x5A5A5A


class StubEvent:
    def __init__(self, stream: StubStream) -> None:
        self.reached = False
        self._stream = stream

    def done(self) -> bool:
        self._stream.time_passes()
        return self.reached

    def wait(self) -> None:
        while not self.reached:
            self._stream.run_one()
        self._stream.time_passes()


class StubMark:
    """Its time is the number of operations that have run before it."""

    def __init__(self) -> None:
        self.time: int | None = None

    def since(self, earlier: StubMark) -> float:
        assert self.time is not None, "a mark was read before its step was done"
        assert earlier.time is not None
        return float(self.time - earlier.time)


class StubStream:
    """See specdec_ext.engine.overlap.Stream; `seed` decides when what runs."""

    immediate = False

    def __init__(self, seed: int) -> None:
        self.clock = 0
        self._random = random.Random(seed)
        self._work: deque[Callable[[], None]] = deque()

    def enqueue(self, operation: Callable[[], None]) -> None:
        self._work.append(operation)
        self.time_passes()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert to.shape == source.shape and to.dtype == source.dtype
        seen = source.clone()
        if self.is_host(to):
            to.fill_(GARBAGE)
        middle = self._random.randint(0, len(to))
        pieces = [slice(0, middle), slice(middle, len(to))]
        self._random.shuffle(pieces)
        for piece in pieces:
            self._work.append(lambda piece=piece: self._copy(to, source, seen, piece))
        self.time_passes()

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Only result rings are copied to: everything else is the device's."""
        return tensor.untyped_storage().data_ptr() in self.host_memory

    host_memory: frozenset[int] = frozenset()

    def _copy(
        self, to: torch.Tensor, source: torch.Tensor, seen: torch.Tensor, piece: slice
    ) -> None:
        if not self.is_host(to):
            assert torch.equal(source[piece], seen[piece]), "staging was written before its event"
        to[piece].copy_(source[piece])

    def record(self) -> StubEvent:
        event = StubEvent(self)

        def reach() -> None:
            event.reached = True

        self.enqueue(reach)
        return event

    def mark(self) -> StubMark:
        mark = StubMark()

        def reach() -> None:
            self.clock -= 1  # takes no time
            mark.time = self.clock

        self.enqueue(reach)
        return mark

    def follow(self) -> None:
        assert not self._work

    def time_passes(self) -> None:
        """Nothing runs, or some of the work, or all of it."""
        mood = self._random.randrange(8)
        count = len(self._work) if mood == 0 else (self._random.randrange(6) if mood < 4 else 0)
        for _ in range(min(count, len(self._work))):
            self.run_one()

    def run_one(self) -> None:
        self.clock += 1
        self._work.popleft()()
