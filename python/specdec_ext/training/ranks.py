"""The processes that torchrun has started: each trains on its part of every step's texts."""

from __future__ import annotations

import datetime
import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import distributed, nn

from ..config.ranks import world_of
from ..errors import UnsupportedConfigError

__all__ = ["ALONE", "Ranks", "alone", "started_ranks"]

# Ranks wait for each other while one still collects.
_PATIENCE = datetime.timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """This process among `world`; with one, every method does nothing."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values` summed over the ranks, in place."""
        if self.world > 1:
            there = values.to(self.device)
            distributed.all_reduce(there)
            values.copy_(there)
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """One reduction of all gradients; a parameter that no text of this rank reached has 0."""
        if self.world == 1:
            return
        owners = [p for p in parameters if p.requires_grad]
        for p in owners:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.flatten() for p in owners if p.grad is not None])
        distributed.all_reduce(flat)
        at = 0
        for p in owners:
            assert p.grad is not None
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()

    def share_state(self, module: nn.Module) -> None:
        """The first rank's parameters and buffers for all."""
        if self.world > 1:
            for value in module.state_dict().values():
                distributed.broadcast(value, 0)

    def any(self, asked: bool) -> bool:
        """Does any rank say so?"""
        return bool(self.sum(torch.tensor([float(asked)]))) if self.world > 1 else asked

    def wait(self) -> None:
        """Until every rank is here."""
        self.any(False)


ALONE = Ranks()


@contextmanager
def started_ranks(device: str) -> Iterator[Ranks]:
    """The ranks that torchrun has started, or this process alone.

    device  "cpu", "cuda" (under torchrun each rank takes its own) or "cuda:N"

    Raises UnsupportedConfigError for a device that is not there.
    """
    launched = world_of()
    world = 1 if launched is None else launched.size
    local = 0 if launched is None else launched.rank % launched.local_size
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UnsupportedConfigError(
                f"device = {device!r}: torch sees no GPU here; use --device cpu"
            )
        if device == "cuda":
            device = f"cuda:{local}"
        if int(device.partition(":")[2]) >= torch.cuda.device_count():
            raise UnsupportedConfigError(
                f"device = {device!r}: this machine has {torch.cuda.device_count()} GPUs; start as "
                "many ranks at most (torchrun --nproc-per-node)"
            )
    where = torch.device(device)
    if world == 1:
        yield Ranks(device=where)
        return
    if where.type == "cuda":
        torch.cuda.set_device(where)
    kind = "nccl" if where.type == "cuda" else "gloo"
    # Its functions have the group of all as a default argument. Imported later (an optimizer does),
    # they would keep the group alive: its threads, running on beside an interpreter that ends,
    # sometimes abort the process.
    importlib.import_module("torch.distributed.nn.functional")
    distributed.init_process_group(kind, timeout=_PATIENCE)
    try:
        yield Ranks(distributed.get_rank(), world, where)
    finally:
        distributed.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """What the first rank does when the others have ended: an LLM here is not one of several."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
