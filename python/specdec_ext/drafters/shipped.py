"""Heads and drafters that come with the package, trained for the built-in default model."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

__all__ = ["shipped_folder"]

_ROOT = Path(__file__).resolve().parent.parent / "data"


def shipped_folder(method: str) -> Path:
    """The folder of what is shipped for `method` ("redrafter", "medusa", ...).

    Raises ConfigError when this installation has none.
    """
    folder = _ROOT / method
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{method}: no trained weights are shipped in this installation ({folder} is not "
            "there); give the folder of your own as `model`"
        )
    return folder
