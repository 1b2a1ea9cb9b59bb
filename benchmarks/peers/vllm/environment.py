"""Makes .venv-vllm, the pinned environment: `python -m benchmarks.peers.vllm.environment`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ENVIRONMENT = ROOT / ".venv-vllm"
PYTHON = Path(os.environ.get("SPECDEC_VLLM_PYTHON", ENVIRONMENT / "bin" / "python"))


def is_ready() -> bool:
    """True when the environment exists and vllm is installed there.

    SPECDEC_VLLM_PYTHON names the interpreter of another one.
    """
    if not PYTHON.exists():
        return False
    probe = [str(PYTHON), "-c", "import importlib.util as u; assert u.find_spec('vllm')"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def make() -> None:
    """Creates the environment and installs the pinned packages; needs a few minutes."""
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "-r", str(HERE / "requirements.txt")], check=True)


if __name__ == "__main__":
    if is_ready():
        print("vllm environment: ready")
    else:
        make()
        print("vllm environment: made")
