"""Memory that kernels of a device compute in."""

from __future__ import annotations

import torch

from ..errors import ModelError
from ..ops._where import GrowingMemory

__all__ = ["Scratch"]


class Scratch:
    """Memory of one kind of call (`what`), kept from layer to layer; what `workspace` takes."""

    def __init__(self, device: torch.device, what: str) -> None:
        self._what = what
        self._memory = GrowingMemory(device, self._refuse)

    def __call__(self, num_bytes: int) -> torch.Tensor:
        return self._memory.take(num_bytes)

    def _refuse(self, num_bytes: int) -> ModelError:
        return ModelError(
            f"{self._what} needs {num_bytes} bytes of scratch and a CUDA graph is being captured; "
            "run a step of this size once before"
        )
