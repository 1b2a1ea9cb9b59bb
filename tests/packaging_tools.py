"""What the packaging tests share: commands, environments, a copy of the tree to build from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
# The parts of the tree that a build reads; the rest cannot reach a wheel by accident.
BUILD_INPUTS = ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
BUILD_FOLDERS = (
    "cmake",
    "cpp",
    "cuda",
    "examples",
    "python",
    "tests",
    "benchmarks",
    "docs",
    "scripts",
)


def project_version() -> str:
    (version,) = re.findall(
        r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    return str(version)


def run(
    *command: str | Path,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command; a failure carries its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )
    if check and done.returncode != 0:
        raise AssertionError(
            f"{' '.join(map(str, command))} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done


def pip(*arguments: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, env=env, cwd=cwd)


def copy_of_the_tree(target: Path) -> Path:
    """The sources without anything built: a build there cannot disturb the developer's own."""
    skip = shutil.ignore_patterns("__pycache__", "*.so", ".*", "results", "build")
    target.mkdir()
    for name in BUILD_INPUTS:
        shutil.copy2(ROOT / name, target / name)
    for name in BUILD_FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=skip)
    return target


def environment_without_nvcc(folder: Path) -> dict[str, str]:
    """An environment in which CMake finds a C++ compiler but no CUDA compiler.

    Folders with an nvcc leave PATH. CMake also looks into system folders by itself, so CUDACXX
    points to a file that does not exist, which it takes for the user's word.
    """
    keep = [
        entry
        for entry in os.environ["PATH"].split(os.pathsep)
        if not (Path(entry) / "nvcc").exists()
    ]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(BIN), *keep]),
        "CUDACXX": str(folder / "no-such-nvcc"),
    }
