"""Where an operation runs: backends, the caller's stream, scratch memory, constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec_ext import _core
from specdec_ext._core import DeviceLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

MASK_WORDS, MAX_STEP_TOKENS = _core.MASK_WORDS, _core.MAX_STEP_TOKENS

_plugins: dict[str, str] = {}  # by name, the files of backends that were opened here
_workspaces: dict[tuple[str, torch.device, int], GrowingMemory] = {}
_outgrown_flags: list[Tensor] = []  # graphs may read them
_flags: dict[tuple[torch.device, int], Tensor] = {}


def backend_names() -> list[str]:
    """Names of the backends that can run operations here: "cpu", "cuda" if usable, plug-ins."""
    return _core.backend_names()


def load_backend(name: str, path: str) -> None:
    """Open a shared library of device operations and register it as ``name``.

    Raises   ValueError if it cannot be opened, is no backend, was built from other sources than
             this package, or the name is taken.
    """
    _core.load_backend(name, path)
    _plugins[name] = path


def plugin_path(name: str) -> str | None:
    """The file of a backend that load_backend() has opened; None: it is built in."""
    return _plugins.get(name)


def device_limits(backend: str = "cuda", device: int = 0) -> DeviceLimits:
    """Properties of a device that the choice of a kernel depends on.

    Raises   ValueError if the backend does not exist or chooses no kernels by device.
    """
    return _core.device_limits(backend, device)


def name_of(backend: str | None, tensor: Any) -> str:
    """The backend that serves a tensor."""
    return backend or ("cuda" if is_cuda(tensor) else "cpu")


def is_cuda(tensor: Any) -> bool:
    return bool(getattr(tensor, "is_cuda", False))


def stream_of(tensor: Any) -> int:
    """The caller's current stream on the tensor's device, 0 where there is none."""
    if is_cuda(tensor):
        import torch

        return int(torch.cuda.current_stream(tensor.device).cuda_stream)
    return 0


def constant_flags(tensor: Tensor, value: int, count: int) -> Tensor:
    """[count] uint8 of one value on the tensor's device, made once for all streams; never written.

    Raises   RuntimeError if it would have to be made while a CUDA graph is captured: that would
             fill it whenever it runs, and not before.
    """
    import torch

    key = (tensor.device, value)
    flags = _flags.get(key)
    if flags is None or flags.numel() < count:
        if is_cuda(tensor) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"is_tree=None: {count} flags would be made while a CUDA graph is being captured; "
                "give is_tree= or call once before"
            )
        if flags is not None:
            _outgrown_flags.append(flags)
        flags = torch.full((max(count, 512),), value, dtype=torch.uint8, device=tensor.device)
        if is_cuda(tensor):  # other streams read it, too
            torch.cuda.current_stream(tensor.device).synchronize()
        _flags[key] = flags
    return flags[:count]


def widened(tensor: Any, columns: int) -> Any:
    """Rows at the width that device kernels read. Copies only what is narrower."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 2 or tensor.shape[1] >= columns:
        return tensor
    wide = torch.zeros(tensor.shape[0], columns, dtype=torch.int32, device=tensor.device)
    wide[:, : tensor.shape[1]] = tensor.view(torch.int32)
    return wide


class GrowingMemory:
    """Bytes of a device that are kept and only ever grown.

    What they have outgrown is kept, too: a captured graph computes there as long as it lives. Each
    piece is at least twice the one before, so all together take less than twice the last.

    refuse  the error, by bytes, for memory that would have to grow while a CUDA graph is captured:
            it would belong to the graph
    """

    def __init__(self, device: torch.device, refuse: Callable[[int], Exception]) -> None:
        self._device, self._refuse = device, refuse
        self._pieces: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """At least so many, and room to begin at a multiple of 256 wherever the allocator puts it.

        Raises   what `refuse` gives.
        """
        import torch

        last = self._pieces[-1].numel() if self._pieces else 0
        if last < num_bytes + 256:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise self._refuse(num_bytes)
            size = max(num_bytes + 256, 2 * last)
            self._pieces.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return self._pieces[-1]


def _no_workspace(num_bytes: int) -> RuntimeError:
    return RuntimeError(
        f"workspace=None: {num_bytes} bytes are needed and a CUDA graph is being captured; give "
        "workspace= (ops.plan_workspace) or call once before"
    )


def workspace_for(backend: str, tensor: Tensor, num_bytes: int) -> Tensor:
    """Scratch of this device and stream (GrowingMemory).

    Raises   RuntimeError if it would have to grow while a CUDA graph is captured.
    """
    key = (backend, tensor.device, stream_of(tensor))
    if key not in _workspaces:
        _workspaces[key] = GrowingMemory(tensor.device, _no_workspace)
    return _workspaces[key].take(num_bytes)
