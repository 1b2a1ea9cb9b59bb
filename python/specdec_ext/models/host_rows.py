"""Host memory that results of a device are copied to."""

from __future__ import annotations

import math

import torch

__all__ = ["HostRows"]


class HostRows:
    """Page-locked for a CUDA device; only ever grown."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()
