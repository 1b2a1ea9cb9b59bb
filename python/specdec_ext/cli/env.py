"""`specdec env`: versions and hardware, for a bug report."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

from .common import human_bytes

__all__ = ["add_arguments", "run"]

_PACKAGES = ("specdec_ext", "torch", "transformers", "tokenizers", "safetensors", "numpy")
_VARIABLES = ("SPECDEC_CACHE_DIR", "SPECDEC_LOG_LEVEL", "SPECDEC_NUM_THREADS", "SPECDEC_CPU_ISA",
              "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def collect() -> dict[str, Any]:
    """Everything that the command shows. A part that fails is reported, not fatal."""
    from importlib.metadata import PackageNotFoundError, version

    from ..bench.machine import num_cpus
    from ..engine.memory_plan import available_memory_bytes
    from ..installation import cpu_name

    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    try:
        from ..installation import build_info

        build: dict[str, Any] = build_info()
    except Exception as error:
        build = {"error": f"{type(error).__name__}: {error}"}
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpus": num_cpus(),
        "memory_available_bytes": available_memory_bytes(),
        "packages": packages,
        "build": build,
        "environment": {k: os.environ[k] for k in _VARIABLES if k in os.environ},
    }


def _text(item: Any) -> str:
    if item is None:
        return "not installed"
    if isinstance(item, dict):  # build_info()["cuda"]
        found = {key: value for key, value in item.items() if value or value is False}
        return ", ".join(f"{key}: {value}" for key, value in found.items())
    return str(item)


def run(args: argparse.Namespace) -> int:
    report = collect()
    if args.json:
        print(json.dumps(report, default=str))
        return 0
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, item in value.items():
                print(f"  {key:<18} {_text(item)}")
        elif name.endswith("bytes"):
            print(f"{name}: {human_bytes(value)}")
        else:
            print(f"{name}: {value}")
    return 0
