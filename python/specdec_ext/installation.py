"""What this installation is, and the number of threads of the CPU backend."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from .config.limits import MAX_DRAFT_LEN, MAX_STEP_TOKENS, MAX_THREADS
from .config.validate import check_int
from .errors import ConfigError

__all__ = [
    "build_info",
    "cmake_dir",
    "cpu_name",
    "get_num_threads",
    "include_dir",
    "set_num_threads",
]


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


def include_dir() -> str:
    """The folder of the C++ headers: `#include <specdec/executor.h>` (docs/cpp_runtime.md)."""
    return str(_installed() / "include")


def cmake_dir() -> str:
    """The folder of specdecConfig.cmake: CMake's specdec_DIR."""
    return str(_installed() / "cmake")


def _installed() -> Path:
    """Where the extension lies: in an editable installation that is not beside the Python files."""
    from . import _core

    return Path(_core.__file__).parent


def cpu_name() -> str:
    """The processor's name as the system gives it, and on x86 its family and model.

    Clouds give several generations one name ("AMD EPYC", "Intel(R) Xeon(R) Processor"), and what
    was measured on one must not be taken for another's.
    """
    about: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            for line in info:
                field, colon, value = line.partition(":")
                if not colon:  # the first processor's fields end with an empty line
                    break
                about[field.strip()] = value.strip()
    except OSError:
        pass
    name = about.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in about and "model" in about:
        name += f", family {about['cpu family']}, model {about['model']}"
    return name


def get_num_threads() -> int:
    """Threads of the CPU kernels (default: $SPECDEC_NUM_THREADS, else the usable CPUs)."""
    from . import _core

    return int(_core.num_threads())


def set_num_threads(num_threads: int) -> None:
    """Use this many threads in the CPU kernels, and in torch if it is installed.

    Results do not depend on the number, but for the last bits in fast numerics. Forward passes that
    run end first. Call it before an engine is opened: engines weigh drafts by the times of the
    number that they began with. If torch is not imported yet, it will find the number in
    OMP_NUM_THREADS. Raises ConfigError for a number outside 1..256.
    """
    check_int("num_threads", num_threads, ConfigError, low=1, high=MAX_THREADS)
    from . import _core

    _core.set_num_threads(num_threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(num_threads)
    else:  # importing it would take a second, and native models do not need it
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
