"""Where a model runs: the device of its tensors and the backend of its operations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _core
from ..errors import ConfigError
from ..extras import MissingPackageError, require

if TYPE_CHECKING:
    import torch

__all__ = ["CPU", "Place", "resolve_device"]


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

    Raises ConfigError that says why a device cannot be used.
    """
    if name == "cpu":
        return CPU
    if name == "auto":
        return _cuda(0) if not _why_no_cuda() else CPU
    if match := re.fullmatch(r"cuda(?::(\d+))?", name):
        if reason := _why_no_cuda():
            raise ConfigError(f"device = {name!r} cannot be used: {reason}; use device='cpu'")
        import torch

        index = int(match[1] or 0)
        count = min(len(_core.cuda_info()["devices"]), torch.cuda.device_count())
        if index >= count:
            raise ConfigError(
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
