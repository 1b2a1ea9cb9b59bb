"""What the parts of a run share: where it runs, and commands that a part starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import common
from benchmarks.gpu.results import scrub
from benchmarks.gpu.supervise import die_with_parent

ROOT = common.ROOT


@dataclass(frozen=True)
class Target:
    """Where the operations run: backend name and device of the tensors."""

    backend: str
    device: torch.device

    @property
    def emulated(self) -> bool:
        return self.device.type == "cpu"


def call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Runs a command in the repository; returns its status and output.

    The output is printed as it comes: it is then in the part's log, whatever becomes of the part.
    """
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    return process.returncode, "".join(lines)


def outcome(status: int, output: str, summary: str = "") -> dict[str, Any]:
    """Returns the record of a command; the end of its output if it failed."""
    if status == 0:
        return {"status": "ok", "summary": summary}
    return {
        "status": "failed",
        "summary": summary or f"exit status {status}",
        "output": scrub(output)[-3000:],
    }
