"""What ranks send to each other: packets of rank 0, and chunks that all of them gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

__all__ = ["HEARTBEAT_S", "Link", "LostRankError", "as_packet", "packet_bytes", "read_packet"]

# A rank that sends nothing for so long while others wait for it has ended. It is due once per part
# of a layer, so that a long prompt is no silence.
HEARTBEAT_S = 10.0

_WORD = np.dtype("<i8")
_HEADER_BYTES = 3 * _WORD.itemsize  # kind, bytes of the first array, bytes of the second


class LostRankError(RuntimeError):
    """A rank that does not answer.

    rank    which
    silent  it gave no sign in time; else it has ended
    """

    def __init__(self, rank: int, cause: object, *, silent: bool | None = None) -> None:
        self.rank = rank
        self.silent = "timed out" in str(cause).lower() if silent is None else silent
        super().__init__(f"rank {rank}: {cause}")


class Link(Protocol):
    """One per process; calls are made in the same order on every rank. Raises LostRankError."""

    rank: int
    size: int

    def tell(self, kind: int, *parts: np.ndarray) -> None:
        """Rank 0: a packet of a kind and up to two arrays of bytes or words, to all others."""
        ...

    def hear(self) -> tuple[int, np.ndarray, np.ndarray]:
        """Other ranks: kind and arrays (bytes) of rank 0's next packet, however long that takes."""
        ...

    def chunk(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes]: where this rank puts what the next gather sends."""
        ...

    def gather(self, num_bytes: int, *, to_rank_0: bool = False) -> np.ndarray:
        """uint8 [size * num_bytes]: every rank's chunk, valid until the next but one gather.

        to_rank_0  the others get nothing
        """
        ...

    def spread(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes]: rank 0's chunk, on every rank. Counts as a gather."""
        ...


def as_packet(kind: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The bytes of a packet."""
    arrays = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    sizes = [len(array) for array in arrays] + [0] * (2 - len(arrays))
    header = np.array([kind, *sizes], dtype=_WORD).view(np.uint8)
    packet: np.ndarray = np.concatenate([header, *arrays])
    return packet


def packet_bytes(beginning: np.ndarray) -> int:
    """Bytes of the packet that begins so."""
    return _HEADER_BYTES + int(beginning[:_HEADER_BYTES].view(_WORD)[1:].sum())


def read_packet(packet: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Kind and arrays, copied."""
    kind, one, two = (int(n) for n in packet[:_HEADER_BYTES].view(_WORD))
    end = _HEADER_BYTES + one
    return kind, packet[_HEADER_BYTES:end].copy(), packet[end : end + two].copy()
