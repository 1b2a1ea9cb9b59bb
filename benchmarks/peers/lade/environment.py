"""Makes .venv-lade, the pinned environment: `python -m benchmarks.peers.lade.environment`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parents[2] / ".venv-lade"
PYTHON = ENVIRONMENT / "bin" / "python"


def is_ready() -> bool:
    """True when the environment exists and lade imports there."""
    if not PYTHON.exists():
        return False
    probe = subprocess.run([str(PYTHON), "-c", "import lade"], capture_output=True)
    return probe.returncode == 0


def make() -> None:
    """Creates the environment and installs the pinned packages; needs a few minutes."""
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "-r", str(HERE / "requirements.txt")], check=True)
    lade = ["--no-build-isolation", "--no-deps", "-r", str(HERE / "requirements-lade.txt")]
    subprocess.run([*pip, *lade], check=True)


if __name__ == "__main__":
    if is_ready():
        print("lade environment: ready")
    else:
        make()
        print("lade environment: made")
