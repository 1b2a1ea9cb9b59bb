"""One invocation of a stage: where it runs, what it may start, where its results go."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import common
from benchmarks.gpu.results import Store, scrub

ROOT = common.ROOT


@dataclass(frozen=True)
class Target:
    """Where the operations run: backend name and device of the tensors."""

    backend: str
    device: torch.device

    @property
    def emulated(self) -> bool:
        return self.device.type == "cpu"


@dataclass
class Run:
    """One invocation of a stage: where results go, what runs, until when."""

    store: Store
    target: Target
    deadline: float  # time.monotonic(); nothing is started after it
    cells: str = ""
    quick: bool = False
    left: list[str] = field(default_factory=list)  # what there was no time for

    @property
    def emulated(self) -> bool:
        return self.target.emulated

    def part(self, stage: str, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Runs one part unless it has a result, was not asked for, or time is up."""
        if (self.cells and not re.search(self.cells, name)) or self.store.has(stage, name):
            return
        if time.monotonic() > self.deadline:
            self.left.append(name)
            return
        started = time.monotonic()
        with self.store.failing(stage, name):
            record = work()
            record.setdefault("seconds", round(time.monotonic() - started, 1))
            if self.emulated:
                record["emulated"] = True
            self.store.put(stage, name, record)
            summary = record.get("summary") or record.get("us") or ""
            print(f"  {name}: {record['status']} {summary}", flush=True)

    def call(
        self, command: Sequence[str], log: str, environment: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Runs a command until the deadline; returns its status and output, kept in build/gpu/."""
        path = ROOT / "build" / "gpu" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        seconds = max(10.0, self.deadline - time.monotonic())
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            held = error.stdout or b""
            text = held.decode(errors="replace") if isinstance(held, bytes) else held
            status, output = 124, f"{text}\nstopped after {seconds:.0f} s"
        path.write_text(output)
        return status, output


def outcome(status: int, output: str, summary: str = "") -> dict[str, Any]:
    """Returns the record of a command; the end of its output if it failed."""
    if status == 0:
        return {"status": "ok", "summary": summary}
    return {
        "status": "failed",
        "summary": summary or f"exit status {status}",
        "output": scrub(output)[-3000:],
    }
