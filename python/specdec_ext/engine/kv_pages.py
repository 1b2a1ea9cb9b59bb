"""The K/V pages of a model: a pool that takes memory as it fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ..models.host_arrays import as_torch
from ..models.kv_storage import page_shape, stored_name

if TYPE_CHECKING:
    from ..models.place import Place

__all__ = ["KvPages"]


class KvPages:
    """K and V pages of `model` (models/kv_storage.py), zeros.

    On the host a page takes memory when it is first written (the operating system maps it then) and
    keeps it until release(); on a device all of it is taken at once.

    tensors  (K, V): the core's LazyZeros where the host runs the steps, else torch tensors
    """

    def __init__(self, model: Any, num_pages: int, page_size: int, place: Place) -> None:
        shape, dtype = page_shape(model, num_pages, page_size), str(stored_name(model))
        self._memory: list[_core.LazyZeros] = []
        if not place.on_cuda:
            self._memory = [_core.LazyZeros(shape, dtype) for _ in range(2)]
            k, v = (zeros if place.is_cpu else as_torch(zeros) for zeros in self._memory)
        else:
            import torch

            there = {"dtype": getattr(torch, dtype), "device": place.device}
            k, v = (torch.zeros(shape, **there) for _ in range(2))
        self.tensors: tuple[Any, Any] = (k, v)

    def release(self) -> None:
        """Give the host's memory back: the pages are zeros again. No request may hold one."""
        for memory in self._memory:
            memory.release()
