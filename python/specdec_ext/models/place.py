"""Where a model runs: the device of its tensors and the backend of its operations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _core
from ..errors import ConfigError, UnsupportedConfigError
from ..extras import MissingPackageError, require

if TYPE_CHECKING:
    import torch

__all__ = ["CPU", "Place", "devices_of_ranks", "draft_place", "resolve_device"]

_CUDA_LIST = re.compile(r"cuda(?::(\d+(?:,\d+)*))?")


@dataclass(frozen=True)
class Place:
    """name     as users write it, with a number for CUDA: "cpu", "cuda:0", a plug-in's name
    memory   where tensors lie, as torch names it: "cpu", also of a plug-in perhaps, or "cuda:0"
    backend  of `ops`
    """

    name: str
    memory: str
    backend: str

    @property
    def device(self) -> torch.device:
        """`memory` for torch."""
        import torch

        return torch.device(self.memory)

    @property
    def on_cuda(self) -> bool:
        """Tensors lie on a CUDA device."""
        return self.memory.startswith("cuda")

    @property
    def is_cpu(self) -> bool:
        """It is the CPU itself, not an emulation on it."""
        return self.backend == "cpu"

    @property
    def num_devices(self) -> int:
        """How many devices of its kind there are; 0: it is the CPU."""
        return len(_core.cuda_info()["devices"]) if self.on_cuda else int(not self.is_cpu)

    def free_bytes(self) -> int | None:
        """Free memory of a CUDA device; None where the host's memory is used."""
        if not self.on_cuda:
            return None
        import torch

        torch.cuda.empty_cache()  # what this process holds and does not use counts as free
        return int(torch.cuda.mem_get_info(self.device)[0])


CPU = Place("cpu", "cpu", "cpu")


def resolve_device(name: str) -> Place:
    """The place that "auto", "cpu", "cuda", "cuda:N" or a loaded backend's name means.

    auto  the first CUDA device if it can be used, else the CPU

    Raises UnsupportedConfigError that says why a device cannot be used, ConfigError for a name that
    is none.
    """
    if name == "cpu":
        return CPU
    if name == "auto":
        return _cuda(0) if not _why_no_cuda() else CPU
    if match := re.fullmatch(r"cuda(?::(\d+))?", name):
        if reason := _why_no_cuda():
            raise UnsupportedConfigError(
                f"device = {name!r} cannot be used: {reason}; use device='cpu'"
            )
        index, count = int(match[1] or 0), _num_cuda()
        if index >= count:
            raise UnsupportedConfigError(
                f"device = {name!r}: devices of this machine are cuda:0..cuda:{count - 1}"
            )
        return _cuda(index)
    plugins = [n for n in _core.backend_names() if n not in ("cpu", "cuda")]
    if name not in plugins:
        loaded = "".join(f", {n!r}" for n in plugins)
        raise ConfigError(
            f"device = {name!r}: expected 'auto', 'cpu', 'cuda', 'cuda:N'{loaded} "
            "(ops.load_backend adds others)"
        )
    memory = "cuda:0" if _core.backend_memory(name) == "cuda" else "cpu"
    return Place(name, memory, name)


def devices_of_ranks(name: str, size: int, local_size: int | None = None) -> tuple[str, ...]:
    """The device of each of `size` ranks, as resolve_device() takes them.

    name        what it takes; "cuda" and "auto" are the first GPUs, "cuda:N" those from N on,
                "cuda:A,B,..." these, in the ranks' order. Where tensors lie in the host's memory
                all ranks say the same
    local_size  ranks of this machine, which has the devices; None: all are

    Raises ConfigError, UnsupportedConfigError where there are fewer devices than ranks, or torch
    cannot connect them.
    """
    local = size if local_size is None else local_size
    match = _CUDA_LIST.fullmatch(name)
    several = [int(n) for n in match[1].split(",")] if match and match[1] else []
    first = resolve_device(f"cuda:{several[0]}" if len(several) > 1 else name)
    if not first.on_cuda or first.backend != "cuda":
        return (name,) * size
    if len(several) > 1 and len(several) != local:
        raise ConfigError(
            f"device = {name!r} names {len(several)} devices, tensor_parallel_size = {size} has "
            f"{local} ranks on this machine; name one for each, or leave the numbers out"
        )
    begin = first.device.index or 0
    numbers = several if len(several) > 1 else list(range(begin, begin + local))
    count = _num_cuda()
    if numbers[-1] >= count and len(several) <= 1:
        raise UnsupportedConfigError(
            f"tensor_parallel_size = {size} on device = {name!r}: {local} ranks of this machine "
            f"take cuda:{begin}..cuda:{numbers[-1]}, and it has {count} CUDA devices; use "
            f"tensor_parallel_size <= {count - begin}, or device='cpu'"
        )
    for number in numbers:
        resolve_device(f"cuda:{number}")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"device = {name!r} names a device twice; give each once")
    if size > 1 and not _has_nccl():
        raise UnsupportedConfigError(
            f"tensor_parallel_size = {size} on device = {name!r}: this torch was built without "
            "NCCL, which connects GPUs; install a build with it, or use tensor_parallel_size = 1"
        )
    return tuple(f"cuda:{numbers[rank % local]}" for rank in range(size))


def draft_place(device: str, target: Sequence[str]) -> Place:
    """Where a draft model runs that is to have a device of its own.

    device  DraftTargetDecodingConfig.device
    target  the device of each of the target's ranks

    Raises ConfigError for a device that cannot be used, that another rank of the target has, or
    that is of another kind than the target's.
    """
    home, place = resolve_device(target[0]), resolve_device(device)
    if place == home:
        return home
    where = f"DraftTargetDecodingConfig.device = {device!r}, the target on {', '.join(target)}: "
    if place.is_cpu or home.is_cpu or place.device.type != home.device.type:
        raise ConfigError(
            f"{where}what one drafts the other reads from device to device, and the CPU is none; "
            "give both a GPU, or leave the draft model's device out"
        )
    if place.name in target[1:]:
        raise ConfigError(
            f"{where}rank {list(target).index(place.name)} has that device, and its pages take "
            f"what is free there; give the draft model a device of its own, or {home.name}, which "
            "it then shares with rank 0"
        )
    return place


def _has_nccl() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_nccl_available()


def _num_cuda() -> int:
    import torch

    return min(len(_core.cuda_info()["devices"]), torch.cuda.device_count())


def _cuda(index: int) -> Place:
    return Place(f"cuda:{index}", f"cuda:{index}", "cuda")


def _why_no_cuda() -> str:
    """Why CUDA cannot be used here; empty: it can."""
    info = _core.cuda_info()
    if not info["devices"]:
        return str(info["reason"])
    try:
        require("torch", "CUDA")
    except MissingPackageError as error:
        return str(error)
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device although this package does; install a "
            "build of torch with CUDA"
        )
    return ""
