"""Tensors of GPUs between ranks: NCCL, in a process group of its own. No GPU has run it yet."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError

__all__ = ["NcclTensorLink", "make_store"]

# The host's heartbeats say who is lost (Team.watch), so NCCL's own watchdog, which would end this
# process without a word, gets no say.
_MEETING = datetime.timedelta(seconds=120)
_NEVER = datetime.timedelta(days=365)


def make_store(port: int | None = None) -> Any:
    """The store through which ranks of this machine find each other: rank 0's, on a free port (its
    `port`), or that of rank 0 at `port`."""
    first = port is None
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make("127.0.0.1", port or 0, is_master=first, wait_for_workers=False, timeout=_MEETING)


class NcclTensorLink:
    """See TensorLink: every call is enqueued, nothing waits on the host, and a CUDA graph may
    record it where all ranks do.

    store   a torch store, by which the ranks find each other
    device  this rank's own; torch has NCCL (devices_of_ranks)

    Raises ConfigError where the GPUs cannot reach each other.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        make: Any = dist.ProcessGroupNCCL
        options = make.Options()
        options._timeout = _NEVER
        torch.cuda.set_device(device)
        self._group = make(store, rank, size, options)
        try:
            # The communicator is made by the first call; a capture must not begin with it.
            self.spread(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise ConfigError(
                f"tensor_parallel_size = {size}: NCCL cannot connect {device} with the other ranks "
                f"({' '.join(str(error).split())}); NCCL_DEBUG=INFO says more"
            ) from error

    def spread(self, tensor: torch.Tensor) -> None:
        """See TensorLink."""
        if tensor.numel():
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._group.broadcast([tensor], options).wait()

    def gather(
        self, own: torch.Tensor, whole: torch.Tensor | None, *, to_rank_0: bool = False
    ) -> None:
        """See TensorLink."""
        if own.numel() == 0:
            return
        if not to_rank_0:
            assert whole is not None
            self._group._allgather_base(whole.view(-1), own.view(-1)).wait()
            return
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [list(whole.unbind(0))] if self.rank == 0 and whole is not None else []
        self._group.gather(parts, [own], options).wait()

    def add(self, tensor: torch.Tensor) -> None:
        """See TensorLink."""
        if tensor.numel():
            self._group.allreduce([tensor]).wait()

    def abort(self) -> None:
        """See TensorLink."""
        self._group.abort()
