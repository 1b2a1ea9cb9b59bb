"""What a reader of a figure must know: program, machine, clocks, load."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ..installation import cpu_name

__all__ = ["about_engine", "about_machine", "clocks", "num_cpus"]

_PROC_CPU = Path("/proc/cpuinfo")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_GPU_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit",
    "temperature.gpu",
)  # fmt: skip


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    """What a program prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def num_cpus() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str | None:
    """The commit of the source tree that the package runs from, '+' if files differ from it;
    None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not (root / "python" / "specdec_ext").is_dir():
        return None
    head = _output("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return (head + ("+" if changed else "")) or None


def _version_of(package: str) -> str | None:
    """None where it is not installed; read without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def clocks(device: str) -> dict[str, Any]:
    """Clock rates and load at this moment; taken before and after the measurement."""
    mhz = [
        float(line.partition(":")[2])
        for line in _read(_PROC_CPU).splitlines()
        if line.startswith("cpu MHz")
    ]
    result: dict[str, Any] = {
        "cpu_mhz": [min(mhz), max(mhz)] if mhz else None,
        "cpu_governor": _read(_GOVERNOR).strip() or None,
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
    if device.startswith("cuda"):
        index = device.partition(":")[2] or "0"
        line = _output("nvidia-smi", f"--id={index}", f"--query-gpu={','.join(_GPU_FIELDS)}",
                       "--format=csv,noheader")  # fmt: skip
        values = [value.strip() for value in line.split(",")] if line else []
        result["gpu"] = dict(zip(_GPU_FIELDS, values, strict=False)) or None
    return result


def about_machine(device: str) -> dict[str, Any]:
    """Versions, processor, threads; what does not change while the program runs."""
    from .._version import __version__
    from ..installation import build_info

    build = build_info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": _commit(),
        "device": device,
        "cpu": cpu_name(),
        "cpus": num_cpus(),
        "cpu_isa": build["cpu_isa"],
        "threads": build["num_threads"],
        "cuda": build["cuda"],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "command": " ".join(["specdec", *_without_keys(sys.argv[1:])]),
    }


def _without_keys(words: list[str]) -> list[str]:
    """A command line as reports may show it."""
    shown = list(words)
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            shown[i] = "--api-key=..."
        elif i > 0 and words[i - 1] == "--api-key":
            shown[i] = "..."
    return shown


def about_engine(llm: Any) -> dict[str, Any]:
    """The model, its arithmetic and the method."""
    config = llm.speculative_config
    return {
        "model": Path(llm.model_path).name,
        "model_impl": llm.model.impl,
        "dtype": str(llm.model.info.dtype).removeprefix("torch."),
        "numerics": llm.engine.numerics,
        "max_batch_size": llm.memory.max_batch_size,
        "method": "none" if config is None else config.method,
        "speculative_config": None if config is None else described(config),
        "synthetic_acceptance": None if config is None else config.synthetic_acceptance,
    }


def described(config: Any) -> dict[str, Any]:
    """A configuration as JSON-ready values; of folders the name alone."""
    values: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, str) and name == "model":
            values[name] = Path(value).name
        elif isinstance(value, (str, int, float, bool, list, type(None))):
            values[name] = value
        elif isinstance(value, tuple):
            values[name] = list(value)
        elif isinstance(value, dict):
            values[name] = {str(key): item for key, item in value.items()}
        else:
            values[name] = type(value).__name__
    return values
