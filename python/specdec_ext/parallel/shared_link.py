"""The link of ranks that rank 0 has started on its machine: memory that their processes share.

A gather over Gloo takes hundreds of microseconds on one machine, one here a few
(docs/tensor_parallel.md), and no rank has to import torch. The memory has no name: it is a file
descriptor that a rank inherits, so nothing is left when the processes are gone.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from .. import _core
from .link import LostRankError, as_packet, packet_bytes, read_packet

__all__ = ["Board", "SharedLink", "make_memory"]

_LINE = 64  # of a counter
_BOARD_BYTES = 8192  # of a rank
_LOOK_S = 0.1  # how often a rank that waits looks whether the other one lives
_FOREVER_S = 3600.0


def make_memory(size: int) -> list[int]:
    """Descriptors of the memory of `size` ranks: control, packets, and chunks of two gathers."""
    files = [
        os.memfd_create(f"specdec-{name}", 0) for name in ("control", "packets", "even", "odd")
    ]
    os.ftruncate(files[0], _control_bytes(size))
    return files


def _control_bytes(size: int) -> int:
    return (2 * size + 1) * _LINE + size * _BOARD_BYTES


class _Growing:
    """A shared file, mapped as far as it was asked for."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.bytes: np.ndarray = np.empty(0, dtype=np.uint8)

    def __call__(self, num_bytes: int) -> np.ndarray:
        """Its first bytes; the file grows where it is shorter."""
        if len(self.bytes) < num_bytes:
            if os.fstat(self._file).st_size < num_bytes:
                os.ftruncate(self._file, num_bytes + num_bytes // 2)
            self.bytes = np.frombuffer(mmap.mmap(self._file, 0), dtype=np.uint8)
        return self.bytes


class Board:
    """What every rank says to all, by keys; with the methods of torch's stores that a team needs.
    A rank writes to its own place alone."""

    def __init__(self, control: mmap.mmap, rank: int, size: int) -> None:
        first = (2 * size + 1) * _LINE
        places = np.frombuffer(control, dtype=np.uint8, offset=first)
        self._places = places.reshape(size, _BOARD_BYTES)
        self._rank = rank
        self._said: dict[str, str] = {}
        self._writes = threading.Lock()  # heartbeats come from a thread of their own

    def set(self, key: str, value: str) -> None:
        """Say it; what does not fit is cut."""
        with self._writes:
            self._said[key] = value[: _BOARD_BYTES // 8]
            data = json.dumps(self._said).encode()
            place = self._places[self._rank]
            place[:8] = 0  # while it is written nothing stands there
            place[8 : 8 + len(data)] = np.frombuffer(data, dtype=np.uint8)
            place[:8] = np.array([len(data)], dtype="<i8").view(np.uint8)

    def check(self, keys: Sequence[str]) -> bool:
        """Has somebody said all of them?"""
        said = self._all()
        return all(key in said for key in keys)

    def get(self, key: str) -> bytes:
        """What was said."""
        return self._all()[key].encode()

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """set() where nobody has said it. Two ranks at once may both."""
        if self._all().get(key, "") == expected:
            self.set(key, value)

    def _all(self) -> dict[str, str]:
        said: dict[str, str] = {}
        for place in self._places:
            length = int(place[:8].view("<i8")[0])
            try:
                said = {**json.loads(bytes(place[8 : 8 + length])), **said} if length else said
            except ValueError:  # it is being written
                continue
        return said


class SharedLink:
    """See Link.

    files        of make_memory(), open in this process
    heartbeat_s  how long a gather waits for another rank
    has_ended    rank 0: whether the process of a rank has
    """

    def __init__(
        self,
        files: Sequence[int],
        rank: int,
        size: int,
        *,
        heartbeat_s: float,
        has_ended: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.rank, self.size = rank, size
        self._heartbeat_s, self._has_ended = heartbeat_s, has_ended
        control = mmap.mmap(files[0], 0)
        self.board = Board(control, rank, size)
        # Chunks of each rank; the packet; what each rank has heard.
        self._counters = _core.SharedCounters(memoryview(control)[: (2 * size + 1) * _LINE])
        self._packet = _Growing(files[1])
        self._chunks = [_Growing(file) for file in files[2:]]
        self._gathers = self._packets = 0
        self._one_way = False  # the last gather: not all ranks have waited for all

    def tell(self, kind: int, *parts: np.ndarray) -> None:
        """See Link. The packet before has been heard by all when this one is written."""
        for rank in range(1, self.size):
            self._wait(self.size + 1 + rank, self._packets, rank, self._heartbeat_s)
        data = as_packet(kind, parts)
        self._packet(len(data))[: len(data)] = data
        self._packets += 1
        self._counters.add(self.size)

    def hear(self) -> tuple[int, np.ndarray, np.ndarray]:
        """See Link. A process that rank 0 has started ends with it, so this waits for ever."""
        self._packets += 1
        while not self._counters.wait(self.size, self._packets, _FOREVER_S):
            pass
        packet = read_packet(self._packet(packet_bytes(self._packet(_LINE))))
        self._counters.add(self.size + 1 + self.rank)
        return packet

    def chunk(self, num_bytes: int) -> np.ndarray:
        """See Link."""
        if self._one_way:
            # Somebody may still read what the chunk is written over; who has come to the last
            # gather has read the one before.
            self._wait_for_others()
            self._one_way = False
        first = self.rank * num_bytes
        return self._chunks[self._gathers % 2](num_bytes * self.size)[first : first + num_bytes]

    def gather(self, num_bytes: int, *, to_rank_0: bool = False) -> np.ndarray:
        """See Link."""
        whole = self._chunks[self._gathers % 2](num_bytes * self.size)[: num_bytes * self.size]
        self._gathers += 1
        self._counters.add(self.rank)
        self._one_way = to_rank_0
        if not to_rank_0 or self.rank == 0:
            self._wait_for_others()
        return whole

    def spread(self, num_bytes: int) -> np.ndarray:
        """See Link."""
        whole = self._chunks[self._gathers % 2](num_bytes * self.size)[:num_bytes]
        self._gathers += 1
        self._counters.add(self.rank)
        self._one_way = True
        if self.rank > 0:
            self._wait(0, self._gathers, 0, self._heartbeat_s)
        return whole

    def _wait_for_others(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._wait(rank, self._gathers, rank, self._heartbeat_s)

    def _wait(self, counter: int, target: int, rank: int, seconds: float) -> None:
        target %= 1 << 32
        while not self._counters.wait(counter, target, min(seconds, _LOOK_S)):
            if self._has_ended(rank):
                raise LostRankError(rank, "its process has ended", silent=False)
            seconds -= _LOOK_S
            if seconds <= 0.0:
                raise LostRankError(rank, "no heartbeat", silent=True)
