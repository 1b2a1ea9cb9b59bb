"""Memory that kernels of a device compute in."""

from __future__ import annotations

import torch

from ..errors import ModelError

__all__ = ["Scratch"]


class Scratch:
    """Memory of one kind of attention call, kept from layer to layer and only ever grown.

    What it has outgrown is kept, too: a captured graph computes there as long as it lives. Each
    piece is at least twice the one before, so all together take less than twice the last.
    """

    def __init__(self, device: torch.device, what: str) -> None:
        self._device, self._what = device, what
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._outgrown: list[torch.Tensor] = []

    def __call__(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes + 256:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ModelError(
                    f"{self._what} needs {num_bytes} bytes of scratch and a CUDA graph is being "
                    "captured; run a step of this size once before"
                )
            if self._memory.numel():
                self._outgrown.append(self._memory)
            # Room to begin at a multiple of 256 bytes wherever the allocator puts it.
            size = max(num_bytes + 256, 2 * self._memory.numel())
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory
