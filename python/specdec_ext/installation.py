"""What this installation is, and the number of threads of the CPU backend."""

from __future__ import annotations

import platform
from typing import Any

from .config.engine import MAX_DRAFT_LEN, MAX_STEP_TOKENS
from .config.validate import check_int
from .errors import ConfigError

__all__ = ["build_info", "cpu_name", "get_num_threads", "set_num_threads"]


def build_info() -> dict[str, Any]:
    """Version, CPU instruction set in use, CUDA part and devices, threads, limits."""
    from . import _core
    from ._version import __version__

    return {
        "version": __version__,
        "core_version": _core.__version__,
        "cpu_isa": _core.cpu_isa(),
        "cuda": dict(_core.cuda_info()),
        "num_threads": _core.num_threads(),
        "max_draft_len": MAX_DRAFT_LEN,
        "max_step_tokens": MAX_STEP_TOKENS,
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def get_num_threads() -> int:
    """Threads of the CPU kernels (default: $SPECDEC_NUM_THREADS, else the usable CPUs)."""
    from . import _core

    return int(_core.num_threads())


def set_num_threads(num_threads: int) -> None:
    """Use this many threads in the CPU kernels and in torch. Results do not depend on it.

    Call it while no request runs. Raises ConfigError for a number outside 1..1024.
    """
    check_int("num_threads", num_threads, ConfigError, low=1, high=1024)
    import torch

    from . import _core

    _core.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
