"""The host's pool of pages: K/V of preempted requests (docs/scheduling.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..models.host_arrays import as_torch

if TYPE_CHECKING:
    from .overlap.streams import Stream

__all__ = ["HostPool"]

_ROUNDS = 5  # of the copies that tell the link's speed; the first are the slowest


class HostPool:
    """Room for copies of `num_pages` pages, of every pool whose pages go by one number, and of
    those whose pages are parts of these.

    pools  K and V of the target and of a draft model: [layers, P, ...], the core's LazyZeros where
           the host runs the steps, else tensors; an EAGLE-3 head's features: [P, ...]
    narrow  (K, V) of the pools of narrow windows, whose pages go by the parts' numbers; on a stream
    narrow_windows  by layer of the first pool pair: those whose memory follow() gives back; with
               `core`
    streams  by index of `pools`: of those on another device, whose pages only its stream may touch
    pinned     copies lie in memory that a CUDA device reads by itself
    on_stream  copies are enqueued with the steps; else the host makes them, by `core`

    pools       as given
    page_bytes  of a page in all of them
    core        where the host runs the steps: the _core.PagePools that makes the copies; else None
    """

    def __init__(
        self,
        pools: Sequence[Any],
        num_pages: int,
        *,
        narrow: Sequence[tuple[Any, Any]] = (),
        narrow_windows: Sequence[int] = (),
        pinned: bool = False,
        on_stream: bool = False,
        streams: Mapping[int, Stream] | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self.page_bytes = 0
        self._memory: list[_core.LazyZeros] = []
        # Tensors: pages [layers, P, ...], copies, the narrow window or None, their stream or None.
        self._pools: list[tuple[Any, Any, int | None, Stream | None]] = []
        self._num_narrow = len(narrow)
        pairs = []
        every: list[tuple[Any, int | None]] = [(pages, None) for pages in pools]
        every += [(pages, window) for window, pair in enumerate(narrow) for pages in pair]
        for index, (pages, window) in enumerate(every):
            shape, dtype = tuple(pages.shape), str(pages.dtype).removeprefix("torch.")
            layered = shape if len(shape) > 3 else (1, *shape)
            each = (layered[0], *layered[2:])
            if pinned:
                import torch

                copies: Any = torch.zeros(num_pages, *each, dtype=pages.dtype, pin_memory=True)
            else:
                copies = _core.LazyZeros((num_pages, *each), dtype)
                self._memory.append(copies)
            if on_stream:
                own = (streams or {}).get(index)
                self._pools.append((as_torch(pages).view(layered), as_torch(copies), window, own))
            pairs.append((pages, copies))
            self.page_bytes += _bytes_of(copies) // num_pages
        windows = (*pools[:2], list(narrow_windows)) if narrow_windows else ()
        self.core = None if on_stream else _core.PagePools(pairs, *windows)

    def copy(
        self, stream: Stream, to_host: bool, page: int, host_page: int, parts: Sequence[int] = ()
    ) -> None:
        """Enqueue a copy of one page, to this pool or from it. A pool that has fewer pages than the
        target is left out where it lacks this one.

        parts  the page's numbers in the pools of narrow windows; -1: there is none
        """
        for pages, copies, window, own in self._pools:
            number = page if window is None else parts[window]
            if 0 <= number < pages.shape[1]:
                ends = pages[:, number], copies[host_page]
                (own or stream).copy(*(ends[::-1] if to_host else ends))

    def bytes_per_second(self, stream: Stream | None = None) -> float:
        """How fast a page is copied there and back, measured now: the best of some rounds. No
        request may run. stream: of a device."""
        seconds = []
        for _ in range(_ROUNDS):
            if stream is None:
                assert self.core is not None
                begin = time.perf_counter()
                self.core.follow(np.array([[1, 0, 0], [0, 0, 0]], dtype=np.int32))
                seconds.append(time.perf_counter() - begin)
                continue
            before = stream.mark()
            self.copy(stream, True, 0, 0, [0] * self._num_narrow)
            self.copy(stream, False, 0, 0, [0] * self._num_narrow)
            for own in {id(pool[3]): pool[3] for pool in self._pools if pool[3]}.values():
                stream.wait_for(own)
            after = stream.mark()
            stream.record().wait()
            seconds.append(after.since(before))
        return 2.0 * self.page_bytes / max(min(seconds), 1e-9)

    def release(self) -> None:
        """Give the memory back, where it is taken as it fills. No request may have copies."""
        for memory in self._memory:
            memory.release()


def _bytes_of(array: Any) -> int:
    return int(array.num_bytes if isinstance(array, _core.LazyZeros) else array.nbytes)
