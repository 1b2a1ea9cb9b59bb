"""Which link brings tensors of a device from rank to rank: the device's type decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .tensor_link import HostTensorLink, TensorLink

if TYPE_CHECKING:
    from .team import Team

__all__ = ["link_for"]


def link_for(team: Team, device: torch.device) -> TensorLink:
    """This rank's link between the tensors of `device` and those of the other ranks' devices: made
    by all ranks at once, and kept. Raises ConfigError where GPUs cannot be connected."""
    key = str(device)
    if key not in team.tensor_links:
        made = HostTensorLink(team.link) if device.type != "cuda" else _nccl(team, device)
        team.tensor_links[key] = made
    return team.tensor_links[key]


def _nccl(team: Team, device: torch.device) -> TensorLink:
    from torch.distributed.distributed_c10d import PrefixStore, Store

    from .nccl_link import NcclTensorLink, make_store

    store = team.store
    number = len(team.tensor_links)
    if not isinstance(store, Store):  # ranks of this machine, which share memory
        key = f"nccl/{number}"
        if team.rank == 0:
            store = make_store()
            team.store.set(key, str(store.port))
        else:
            store = make_store(int(team.hear_text(key)))
    return NcclTensorLink(PrefixStore(f"nccl/{number}", store), team.rank, team.size, device)
