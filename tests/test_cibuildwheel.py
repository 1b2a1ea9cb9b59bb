"""The configuration of cibuildwheel in pyproject.toml, read by the program itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import packaging_tools as tools

PYTHONS = ("cp310", "cp311", "cp312", "cp313", "cp314")


@pytest.mark.slow  # the program comes from an index
def test_what_would_be_built(tmp_path: Path) -> None:
    """One wheel per Python and architecture; a key that it does not know would be an error."""
    tools.run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    tools.run(python, "-m", "pip", "install", "-q", "cibuildwheel>=3", cwd=tmp_path)
    for architecture in ("x86_64", "aarch64"):
        done = tools.run(
            python, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux",
            "--archs", architecture, tools.ROOT,
        )  # fmt: skip
        expected = {f"{name}-manylinux_{architecture}" for name in PYTHONS}
        assert set(done.stdout.split()) == expected
