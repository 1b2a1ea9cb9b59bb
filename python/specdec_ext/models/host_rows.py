"""Host memory that results of a device are copied to."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

__all__ = ["HostRows"]


class HostRows:
    """Page-locked for a CUDA device; only ever grown.

    watch  called while wait() waits, if that may be in vain; it may raise
    """

    def __init__(self, device: torch.device, watch: Callable[[], None] | None = None) -> None:
        self._device, self._watch = device, watch
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape, contents arbitrary; what was taken before is given up."""
        needed = math.prod(shape) * dtype.itemsize
        if self._memory.numel() < needed:
            self._memory = torch.empty(2 * needed, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[:needed].view(dtype).view(shape)

    def wait(self) -> None:
        """Until everything on the device's current stream is done."""
        if not self._pinned:
            return
        stream = torch.cuda.current_stream(self._device)
        while self._watch is not None and not stream.query():
            self._watch()
        stream.synchronize()
