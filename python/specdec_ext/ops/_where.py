"""Where an operation runs: backends, the caller's stream, scratch memory, constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec_ext import _core
from specdec_ext._core import DeviceLimits

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MASK_WORDS, MAX_STEP_TOKENS = _core.MASK_WORDS, _core.MAX_STEP_TOKENS

_plugins: dict[str, str] = {}  # by name, the files of backends that were opened here
_workspaces: dict[tuple[str, torch.device, int], Tensor] = {}
_outgrown: list[Tensor] = []
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
    """[count] uint8 of one value on the tensor's device, made once; never written."""
    import torch

    key = (tensor.device, value)
    flags = _flags.get(key)
    if flags is None or flags.numel() < count:
        flags = torch.full((max(count, 512),), value, dtype=torch.uint8, device=tensor.device)
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


def workspace_for(backend: str, tensor: Tensor, num_bytes: int) -> Tensor:
    """Scratch of this device and stream, kept and only ever grown. What it has outgrown is kept,
    too, for graphs that compute there.

    Raises   RuntimeError if it would have to grow while a CUDA graph is captured: its memory would
             then belong to the graph.
    """
    import torch

    key = (backend, tensor.device, stream_of(tensor))
    scratch = _workspaces.get(key)
    if scratch is None or scratch.numel() < num_bytes + 256:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"workspace=None: {num_bytes} bytes are needed and a CUDA graph is being "
                "captured; give workspace= (ops.plan_workspace) or call once before"
            )
        # Room to begin at a multiple of 256 bytes wherever the allocator puts it.
        size = num_bytes + 256
        if scratch is not None and tensor.is_cuda:
            _outgrown.append(scratch)
            size = max(size, 2 * scratch.numel())  # all together take less than twice the last
        scratch = torch.empty(size, dtype=torch.uint8, device=tensor.device)
        _workspaces[key] = scratch
    return scratch
