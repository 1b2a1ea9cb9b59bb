"""The link of ranks that torchrun has started, on one machine or several: Gloo.

The process groups are this object's own: a caller's default group is not touched.
"""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .link import LostRankError, as_packet, packet_bytes, read_packet

__all__ = ["GlooLink"]

_IDLE = datetime.timedelta(days=365)
_FIRST_BYTES = 16384  # of a packet; most packets have no more
_TAGS = 1 << 30


class _Places:
    """The chunks of all ranks in one buffer."""

    def __init__(self, memory: torch.Tensor, num_bytes: int, rank: int, size: int) -> None:
        self.whole = memory[: size * num_bytes]
        self.chunks = [self.whole[r * num_bytes : (r + 1) * num_bytes] for r in range(size)]
        self.mine = self.chunks[rank]
        self.bytes: np.ndarray = self.whole.numpy()
        self.my_bytes: np.ndarray = self.mine.numpy()


class GlooLink:
    """See Link.

    heartbeat_s  how long a gather waits for another rank
    """

    def __init__(self, store: Any, rank: int, size: int, *, heartbeat_s: float) -> None:
        self.rank, self.size = rank, size
        self._peers = [other for other in range(size) if other != rank]
        self._control = _gloo(store, "control", rank, size, _IDLE)
        self._steps = _gloo(store, "steps", rank, size, datetime.timedelta(seconds=heartbeat_s))
        # Two in turn: a rank may fill its next chunk while another still reads the last ones.
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._places: list[dict[int, _Places]] = [{}, {}]
        self._gathers = 0
        self._packets = 0
        self._first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)

    def tell(self, kind: int, *parts: np.ndarray) -> None:
        """See Link."""
        data = torch.from_numpy(as_packet(kind, parts))
        first = self._first
        count = min(len(data), _FIRST_BYTES)
        first[:count] = data[:count]
        self._exchange(self._control, send=first, peers=self._peers, tag=self._packet_tag())
        if len(data) > _FIRST_BYTES:
            rest = data[_FIRST_BYTES:]
            self._exchange(self._control, send=rest, peers=self._peers, tag=self._packet_tag())

    def hear(self) -> tuple[int, np.ndarray, np.ndarray]:
        """See Link."""
        first = self._first
        self._exchange(self._control, receive={0: first}, peers=[0], tag=self._packet_tag())
        data: np.ndarray = first.numpy()
        total = packet_bytes(data)
        if total > _FIRST_BYTES:
            rest = torch.empty(total - _FIRST_BYTES, dtype=torch.uint8)
            self._exchange(self._control, receive={0: rest}, peers=[0], tag=self._packet_tag())
            data = np.concatenate([data, rest.numpy()])
        return read_packet(data)

    def chunk(self, num_bytes: int) -> np.ndarray:
        """See Link."""
        return self._place(num_bytes).my_bytes

    def gather(self, num_bytes: int, *, to_rank_0: bool = False) -> np.ndarray:
        """See Link."""
        place = self._place(num_bytes)
        sends = not to_rank_0 or self.rank > 0
        receives = not to_rank_0 or self.rank == 0
        self._exchange(
            self._steps,
            send=place.mine if sends else None,
            receive={r: place.chunks[r] for r in self._peers} if receives else {},
            peers=[0] if to_rank_0 and self.rank > 0 else self._peers,
            tag=self._gathers % _TAGS,
        )
        self._gathers += 1
        return place.bytes

    def spread(self, num_bytes: int) -> np.ndarray:
        """See Link."""
        place, first = self._place(num_bytes), self.rank == 0
        self._exchange(
            self._steps,
            send=place.mine if first else None,
            receive={} if first else {0: place.chunks[0]},
            peers=self._peers if first else [0],
            tag=self._gathers % _TAGS,
        )
        self._gathers += 1
        return place.bytes[:num_bytes]

    def _place(self, num_bytes: int) -> _Places:
        turn = self._gathers % 2
        places = self._places[turn]
        place = places.get(num_bytes)
        if place is None:
            needed = num_bytes * self.size
            if self._memory[turn].numel() < needed:
                self._memory[turn] = torch.empty(needed + needed // 2, dtype=torch.uint8)
                places.clear()
            elif len(places) > 256:
                places.clear()
            place = places[num_bytes] = _Places(self._memory[turn], num_bytes, self.rank, self.size)
        return place

    def _packet_tag(self) -> int:
        self._packets += 1
        return self._packets % _TAGS

    def _exchange(
        self,
        group: Any,
        *,
        peers: list[int],
        tag: int,
        send: torch.Tensor | None = None,
        receive: dict[int, torch.Tensor] | None = None,
    ) -> None:
        lost: LostRankError | None = None
        works = []
        for peer, tensor in (receive or {}).items():
            works.append((peer, _started(group.recv, tensor, peer, tag)))
        if send is not None:
            works += [(peer, _started(group.send, send, peer, tag)) for peer in peers]
        for peer, work in works:
            try:
                if isinstance(work, BaseException):
                    raise work
                work.wait()
            except RuntimeError as error:
                # Who closed its connection may have done so because another rank is silent.
                found = LostRankError(peer, error)
                lost = found if lost is None or found.silent > lost.silent else lost
        if lost is not None:
            raise lost


def _started(call: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
    try:
        return call([tensor], peer, tag)
    except RuntimeError as error:
        return error


def _gloo(store: Any, name: str, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)
