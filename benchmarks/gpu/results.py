"""The result file: one per device, date and commit, rewritten before and after every part.

    {"benchmark": "gpu", "emulated": false, "environment": {...},
     "stages": {"bench-kernel": {"cells": {"attn-b8-m64-g4-ctx16384": {...}}, ...}}}

A later run with the same device and commit continues the file that it finds. Emulated runs go to
another folder, are called emulated-*, say so inside, and hold no times at all. The file is replaced
whole: whatever kills the runner, it can be read. What a status means: supervise.py.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from specdec_ext.installation import cpu_name

DONE = ("ok", "unavailable", "unsupported")  # statuses of parts that are not run again
EMULATED_RESULTS = common.ROOT / "build" / "gpu-emulated"
MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:[\w.+-]+/)+")


def device_slug(name: str) -> str:
    """Returns 'h200' for 'NVIDIA H200': lower case, no vendor, dashes."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce")) or "gpu"


def scrub(text: str) -> str:
    """Returns a tool's output without the folders of this machine."""
    return MACHINE_PATH.sub("", text.replace(str(common.ROOT) + "/", ""))


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def clocks() -> dict[str, str]:
    """Returns what the driver tells about clocks, power and temperature now; read, never set."""
    fields = "clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,driver_version"
    text = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    values = text.splitlines()[0].split(", ") if text else []
    return dict(zip(fields.split(","), values, strict=False))


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(commit: str, emulated: bool) -> dict[str, Any]:
    """Returns what a reader of a figure must know. `commit`: of a copy that is no git checkout."""
    found = commit or common.commit()
    release = re.search(r"release ([\d.]+)", _output("nvcc", "--version"))
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": found.rstrip("+"),
        # A copy without git cannot tell: the caller named the commit, its changes are unknown.
        "dirty": None if commit else found.endswith("+"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "nvcc": release[1] if release else None,
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            **{
                name: package_version(name)
                for name in ("specdec_ext", "triton", "flashinfer-python")
            },
        },
        "arguments": sys.argv[1:2],
    }
    if emulated:
        result["device"] = "emulated"
        return result
    device = torch.cuda.get_device_properties(0)
    result |= {
        "device": device.name,
        "compute_capability": f"{device.major}.{device.minor}",
        "multiprocessors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "l2_bytes": getattr(device, "L2_cache_size", None),
        "clocks": clocks(),
    }
    return result


class Store:
    """The result file of one device and commit."""

    def __init__(self, path: Path, data: dict[str, Any], force: bool = False) -> None:
        self.path = path
        self.data = data
        self._force = force

    @classmethod
    def open(cls, folder: Path, env: dict[str, Any], force: bool = False) -> Store:
        """Continues the newest file of this device and commit in `folder`, or begins one.

        env    of environment()
        force  nothing that the file holds counts as done
        """
        emulated = env["device"] == "emulated"
        slug = device_slug(env["device"])
        name = re.compile(rf"{re.escape(slug)}-\d{{4}}-\d\d-\d\d-{re.escape(env['commit'])}\.json")
        found = sorted(path for path in folder.glob("*.json") if name.fullmatch(path.name))
        if found:
            data = json.loads(found[-1].read_text())
            if data["emulated"] != emulated:
                raise SystemExit(
                    f"{found[-1].name}: emulated is {data['emulated']}, not {emulated}"
                )
            dirty = {data["environment"]["dirty"], env["dirty"]}
            data["environment"]["dirty"] = (
                True if True in dirty else None if None in dirty else False
            )
            return cls(found[-1], data, force)
        data = {"benchmark": "gpu", "emulated": emulated, "environment": env, "stages": {}}
        return cls(folder / f"{slug}-{env['date'][:10]}-{env['commit']}.json", data, force)

    def has(self, stage: str, cell: str) -> bool:
        """Whether the cell has a result that stands: what did not end well is run again."""
        record = self.cells(stage).get(cell, {})
        return not self._force and record.get("status") in DONE

    def cells(self, stage: str) -> dict[str, Any]:
        found: dict[str, Any] = self.data["stages"].get(stage, {}).get("cells", {})
        return found

    def put(self, stage: str, cell: str, record: dict[str, Any]) -> None:
        """Adds one cell's record and writes the file, whole or not at all."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        entry = self.data["stages"].setdefault(stage, {"cells": {}})
        entry["cells"][cell] = {"measured": now, **record}
        self.write()

    def note_run(self, facts: dict[str, Any], begin: bool = True) -> None:
        """Adds facts about an invocation of the runner: a new one, or the last."""
        runs = self.data.setdefault("runs", [])
        if begin or not runs:
            runs.append({})
        runs[-1].update(facts)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        with new.open("w") as file:
            file.write(json.dumps(self.data, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a machine that is taken away loses one part, not the file
        new.replace(self.path)
