"""A process of another environment that answers JSON lines: what is measured there, from here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any


class Side:
    """A worker process in one of the environments that are compared.

    worker: the file beside this one that it runs; its first line says which package it imports.
    """

    def __init__(self, python: Path, worker: str = "worker.py", threads: int = 1) -> None:
        count = str(threads)
        self.process = subprocess.Popen(
            # -I: neither our folder nor PYTHONPATH may offer another specdec_ext.
            [str(python), "-I", str(Path(__file__).with_name(worker))],
            env={**os.environ, "OMP_NUM_THREADS": count, "SPECDEC_NUM_THREADS": count},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, case: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self.process.communicate()
