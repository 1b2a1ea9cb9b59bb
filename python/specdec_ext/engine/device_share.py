"""A rank's part of a model on a device: it runs what rank 0's steps do to its layers and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.device_ranks import DeviceRanks
from ..parallel.team import COPIES, FORWARD, HOST_POOL, MOVES, RECORD, RECORDED, REPLAY
from .host_pool import HostPool
from .kv_pages import KvPages
from .overlap import CudaGraphRecorder, CudaStream
from .overlap.build import make_stream

if TYPE_CHECKING:
    from ..models.device_model import DeviceModel
    from ..models.place import Place
    from .overlap import GraphRecorder

__all__ = ["DeviceShare"]


class DeviceShare:
    """See Share. Everything is enqueued on one stream, in the order of rank 0's packets: its host
    may be steps ahead of its device, and so may this one."""

    def __init__(self, model: DeviceModel, place: Place) -> None:
        assert model.decoder.ranks is not None
        self._model, self._place = model, place
        self._ranks: DeviceRanks = model.decoder.ranks
        self._stream = make_stream(place)
        self._pages: KvPages | None = None
        self._pools: tuple[tuple[Any, Any, int], ...] = ()
        self._host_pool: HostPool | None = None
        self._recorder: GraphRecorder | None = None
        self._graphs: dict[int, Callable[[], None]] = {}  # by rank 0's numbers

    def bind(self, words: np.ndarray) -> None:
        """See Share; then, for each narrow window: pages, layers, and which."""
        pages, page_size, *rest = words.tolist()
        narrow = []
        while rest:
            count, layers = rest[:2]
            narrow.append((tuple(rest[2 : 2 + layers]), count))
            rest = rest[2 + layers :]
        self._ranks.connect()  # rank 0 waits for that; where there is no room it is told later
        self._graphs.clear()  # they were recorded over the pages of before
        self._pages = self._host_pool = self._recorder = None
        made = self._pages = KvPages(self._model, pages, page_size, self._place, narrow)
        self._pools = (
            (*made.tensors, 0),
            *((pool.k, pool.v, table) for table, pool in enumerate(made.narrow, start=1)),
        )
        self._model.bind_cache(*made.tensors, made.narrow)
        self._stream.follow()  # the pages' zeros

    def forward(self, words: np.ndarray, rest: np.ndarray) -> None:
        """See Share."""
        self._stream.enqueue(lambda: self._step(words))

    def _step(self, words: np.ndarray) -> None:
        decoder = self._model.decoder
        step, packet = self._ranks.hear_step(words)
        hidden = decoder.forward_rows(step, every_row=bool(packet.every_row))
        if packet.scores:
            decoder.step_scores(hidden, None)
        else:
            decoder.greedy(hidden)

    def do(self, kind: int, words: np.ndarray) -> None:
        """See Share."""
        if kind == MOVES:
            self._stream.enqueue(lambda: self._move(words))
        elif kind == RECORD:
            self._record(int(words[0]))
        elif kind == REPLAY:
            self._stream.enqueue(self._graphs[int(words[0])])
        elif kind == HOST_POOL and self._pages is not None:
            self._host_pool = HostPool(
                self._pages.tensors,
                int(words[0]),
                narrow=[(pool.k, pool.v) for pool in self._pages.narrow],
                pinned=self._place.on_cuda,
                on_stream=True,
            )
        elif kind == COPIES and self._host_pool is not None:
            rest = words.tolist()
            while rest:
                to_host, page, host_page, parts = rest[:4]
                self._host_pool.copy(
                    self._stream, bool(to_host), page, host_page, rest[4 : 4 + parts]
                )
                rest = rest[4 + parts :]

    def _record(self, number: int) -> None:
        """Rank 0 records, just now: its packets up to RECORDED say what."""
        kept = False

        def record() -> None:
            nonlocal kept
            while True:
                kind, words = self._ranks.hear()
                if kind == RECORDED:
                    kept = bool(words[0])
                    return
                (self._step if kind == FORWARD else self._move)(words)

        if self._recorder is None:
            self._recorder = self._make_recorder()
        replay = self._recorder.record((record,))
        if kept:
            self._graphs[number] = replay

    def _make_recorder(self) -> GraphRecorder:
        assert isinstance(self._stream, CudaStream)  # rank 0 records on no other device
        return CudaGraphRecorder(self._stream)

    def _move(self, words: np.ndarray) -> None:
        self._ranks.hear_moves(words).run(self._pools, self._place.backend)

    def release(self) -> None:
        """See Share."""
        if self._pages is not None:
            self._pages.release()
        if self._host_pool is not None:
            self._host_pool.release()
