"""The K/V pages of a model: a pool that takes memory as it fills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from .. import _core

if TYPE_CHECKING:
    from ..models.base import StepModel
    from ..models.place import Place

__all__ = ["KvPages"]


class KvPages:
    """K and V pages [layers, pages, kv_heads, page size, head_dim] of `model`, zeros.

    On the host a page takes memory when it is first written (the operating system maps it then) and
    keeps it until release(); on a device all of it is taken at once.
    """

    def __init__(self, model: StepModel, num_pages: int, page_size: int, place: Place) -> None:
        shape = (model.num_layers, num_pages, model.num_kv_heads, page_size, model.head_dim)
        self._memory: list[_core.LazyZeros] = []
        if place.device.type == "cpu":
            dtype = str(model.kv_dtype).removeprefix("torch.")
            self._memory = [_core.LazyZeros(shape, dtype) for _ in range(2)]
            k, v = (from_dlpack(zeros) for zeros in self._memory)
        else:
            k, v = (torch.zeros(shape, dtype=model.kv_dtype, device=place.device) for _ in range(2))
        self.tensors: tuple[torch.Tensor, torch.Tensor] = (k, v)

    def release(self) -> None:
        """Give the host's memory back: the pages are zeros again. No request may hold one."""
        for memory in self._memory:
            memory.release()
