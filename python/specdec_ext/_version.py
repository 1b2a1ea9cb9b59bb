"""The installed version, from the package's own metadata (pyproject.toml is where it is set)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("specdec_ext")
except PackageNotFoundError:  # a source tree on sys.path, not installed
    __version__ = "0+unknown"
