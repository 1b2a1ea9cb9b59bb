"""Tensors of a device between ranks: what a layer has to bring together, in the stream's order.

Packets of the host (Link) say which step comes; what the step's operations have made, which the
host does not know, goes this way. Two implementations: HostTensorLink where tensors lie in the
host's memory, as an emulated device's do, and NcclTensorLink between GPUs.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from .link import Link

__all__ = ["HostTensorLink", "TensorLink"]


class TensorLink(Protocol):
    """One per process and device. Calls are made in the same order with the same sizes on every
    rank; tensors are contiguous and lie on the device. They are enqueued on the current stream, and
    the host does not wait, unless it is what moves the bytes: then they raise LostRankError.
    """

    rank: int
    size: int

    def spread(self, tensor: torch.Tensor) -> None:
        """Rank 0's values, any shape and dtype, into every rank's tensor."""
        ...

    def gather(
        self, own: torch.Tensor, whole: torch.Tensor | None, *, to_rank_0: bool = False
    ) -> None:
        """whole[r], [size, ...], becomes rank r's `own` [...] of the same dtype.

        to_rank_0  the others get nothing, their `whole` is not looked at
        """
        ...

    def add(self, tensor: torch.Tensor) -> None:
        """Every rank's tensor, of floats, becomes the sum of all."""
        ...

    def abort(self) -> None:
        """A rank is lost: nothing that was enqueued waits for it any more."""
        ...


class HostTensorLink:
    """See TensorLink; the link moves the bytes.

    Sums are float32, in the ranks' order, rounded once: each rank makes the same.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank, self.size = link.rank, link.size

    def spread(self, tensor: torch.Tensor) -> None:
        """See TensorLink."""
        data = _bytes_of(tensor)
        if len(data) == 0:
            return
        if self.rank == 0:
            self._link.chunk(len(data))[:] = data
            self._link.spread(len(data))
        else:
            data[:] = self._link.spread(len(data))

    def gather(
        self, own: torch.Tensor, whole: torch.Tensor | None, *, to_rank_0: bool = False
    ) -> None:
        """See TensorLink."""
        data = _bytes_of(own)
        if len(data) == 0:
            return
        self._link.chunk(len(data))[:] = data
        found = self._link.gather(len(data), to_rank_0=to_rank_0)
        if whole is not None and not (to_rank_0 and self.rank > 0):
            _bytes_of(whole)[:] = found

    def add(self, tensor: torch.Tensor) -> None:
        """See TensorLink."""
        data = _bytes_of(tensor)
        if len(data) == 0:
            return
        self._link.chunk(len(data))[:] = data
        found = self._link.gather(len(data)).reshape(self.size, -1)
        parts = [torch.from_numpy(part).view(tensor.dtype).float() for part in found]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        tensor.copy_(total.view(tensor.shape))

    def abort(self) -> None:
        """See TensorLink. Who waits looks whether the others live."""


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    data: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return data
