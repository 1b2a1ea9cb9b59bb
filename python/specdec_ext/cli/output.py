"""Files that a command writes for its user."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path

from .parser import usage_error

__all__ = ["check_output", "write_file"]


def check_output(args: argparse.Namespace, flag: str, path: str | None) -> None:
    """Refuse, before any work, a file that could not be written in the end. Raises SystemExit(2).

    path  as the flag gives it; None: it was not given
    """
    if path is None:
        return
    file = Path(path).expanduser().resolve()
    if not file.parent.is_dir():
        usage_error(args, f"{flag} {path!r}: no such folder {str(file.parent)!r}; make it first")
    if file.is_dir():
        usage_error(args, f"{flag} {path!r} is a folder; give the name of a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        usage_error(args, f"{flag} {path!r} cannot be written; give a file that can be")


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
