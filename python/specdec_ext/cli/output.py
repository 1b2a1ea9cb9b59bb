"""Files that a command writes for its user."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from .parser import usage_error

__all__ = ["write_file"]


def write_file(args: argparse.Namespace, path: Path, text: str) -> None:
    """Write a file whole or not at all, folders included. Raises SystemExit(2)."""
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        usage_error(args, f"{str(path)!r} cannot be written: {error.strerror or error}")
