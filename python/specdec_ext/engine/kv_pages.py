"""The K/V pages of a model: a pool that takes memory as it fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import _core
from ..models.host_arrays import as_torch
from ..models.kv_storage import LayerPool, page_shape, stored_name

if TYPE_CHECKING:
    from ..models.place import Place

__all__ = ["KvPages"]


class KvPages:
    """K and V pages of `model` (models/kv_storage.py), zeros.

    narrow  (layers, pages) of each narrow window whose layers have pools of their own

    On the host a page takes memory when it is first written (the operating system maps it then) and
    keeps it until release(); on a device all of it is taken at once.

    tensors  (K, V): the core's LazyZeros where the host runs the steps, else torch tensors; of the
             layers that are in no pool of `narrow`
    narrow   the pools of narrow windows
    """

    def __init__(
        self,
        model: Any,
        num_pages: int,
        page_size: int,
        place: Place,
        narrow: Sequence[tuple[tuple[int, ...], int]] = (),
    ) -> None:
        self._memory: list[_core.LazyZeros] = []
        self._place, self._dtype = place, str(stored_name(model))

        def pages(layers: int, count: int) -> tuple[Any, Any]:
            return self._zeros(page_shape(model, count, page_size, layers))

        slim = sum(len(layers) for layers, _ in narrow)
        self.tensors = pages(model.num_layers - slim, num_pages)
        self.narrow = tuple(LayerPool(some, *pages(len(some), count)) for some, count in narrow)

    def _zeros(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        if self._place.on_cuda:
            import torch

            there = {"dtype": getattr(torch, self._dtype), "device": self._place.device}
            return torch.zeros(shape, **there), torch.zeros(shape, **there)
        k, v = (_core.LazyZeros(shape, self._dtype) for _ in range(2))
        self._memory += [k, v]
        return (k, v) if self._place.is_cpu else (as_torch(k), as_torch(v))

    def release(self) -> None:
        """Give the host's memory back: the pages are zeros again. No request may hold one."""
        for memory in self._memory:
            memory.release()
