"""Builds the commit that step_versions compares with (`python -m` this module builds it alone).

Below build/base/<commit>/: `source`, a git worktree, and `environment`, a virtual environment with
that commit's extension, built without CUDA. Everything else (torch, transformers, the build's own
tools) is that of the environment which runs this: both sides then differ in this package alone.
Needs the repository's history; takes some minutes of compiling once and is used again afterwards.
To be rid of it: `git worktree remove --force build/base/<commit>/source`, then remove the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

COMMIT = "cebcf29"
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / "base" / COMMIT
SOURCE, ENVIRONMENT = FOLDER / "source", FOLDER / "environment"
PYTHON = ENVIRONMENT / "bin" / "python"
WHOLE = FOLDER / "complete"  # written when everything else is there


def is_ready() -> bool:
    """True when the environment is complete and of this Python."""
    return WHOLE.is_file() and WHOLE.read_text() == sys.version


def make() -> None:
    """Creates worktree and environment; what an interrupted run left is used or replaced."""
    WHOLE.unlink(missing_ok=True)
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "prune"], check=True)
    if not (SOURCE / "pyproject.toml").is_file():
        subprocess.run([*git, "add", "--detach", str(SOURCE), COMMIT], check=True)
    venv = [sys.executable, "-m", "venv", "--without-pip", "--clear", str(ENVIRONMENT)]
    subprocess.run(venv, check=True)
    # A .pth file puts our packages behind the environment's own and runs none of their .pth files,
    # so that the editable install of this checkout stays out of it.
    site = ENVIRONMENT / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (site / "site-packages" / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    tools = str(Path(sys.executable).parent)
    subprocess.run(
        [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--ignore-installed", str(SOURCE)],
        env={**os.environ, "PATH": tools + os.pathsep + os.environ["PATH"], "SPECDEC_CUDA": "OFF"},
        check=True,
    )  # fmt: skip
    WHOLE.write_text(sys.version)


def ready() -> Path:
    """The Python of that environment, which is built first if it is not there."""
    if not is_ready():
        print(f"building {COMMIT} in {FOLDER.relative_to(ROOT)}", file=sys.stderr, flush=True)
        make()
    return PYTHON


if __name__ == "__main__":
    print(f"environment of {COMMIT}: {ready().relative_to(ROOT)}")
