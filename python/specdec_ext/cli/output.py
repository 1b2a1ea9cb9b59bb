"""Files that a command writes for its user."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from .parser import usage_error

__all__ = ["check_outputs", "write_file"]


def check_outputs(
    args: argparse.Namespace,
    outputs: Mapping[str, str | None],
    inputs: Iterable[str | None] = (),
) -> None:
    """Refuse, before any work, files that could not be written in the end, one file for two
    outputs, and a file that the command reads. Raises SystemExit(2).

    outputs  paths by the flags that give them; None: it was not given
    inputs   paths that the command reads; None: none
    """
    read = {_target(name) for name in inputs if name is not None}
    taken: dict[Path, str] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        file = _target(path)
        if not file.parent.is_dir():
            usage_error(args, f"{flag} {path!r}: no such folder {str(file.parent)!r}; make it "
                        "first")  # fmt: skip
        if file.is_dir():
            usage_error(args, f"{flag} {path!r} is a folder; give the name of a file")
        if file.is_symlink() or not os.access(file if file.exists() else file.parent, os.W_OK):
            usage_error(args, f"{flag} {path!r} cannot be written; give a file that can be")
        if file in read:
            usage_error(args, f"{flag} {path!r} is a file that the command reads; give another")
        if file in taken:
            usage_error(args, f"{taken[file]} and {flag} both name {path!r}; give two files")
        if file.is_file() or not file.exists():
            taken[file] = flag


def write_file(args: argparse.Namespace, path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all; a link to it stays one. A device or a pipe is written to,
    not replaced. Raises SystemExit(2).

    content  text is written as UTF-8
    """
    data = content.encode() if isinstance(content, str) else content
    file = _target(path)
    try:
        replaceable = file.is_file() or not os.path.lexists(file)
        if replaceable and os.access(file.parent, os.W_OK):
            _replace(file, data)
        else:
            with file.open("wb") as stream:
                stream.write(data)
    except OSError as error:
        usage_error(args, f"{str(path)!r} cannot be written: {error.strerror or error}")


def _target(path: str | Path) -> Path:
    """The file behind all links; of links in a circle the one where it closes."""
    return Path(os.path.realpath(Path(path).expanduser()))


def _replace(file: Path, data: bytes) -> None:
    # A name of its own: another file of the user's must not be in the way.
    new = file.with_name(f".specdec-{os.urandom(8).hex()}")
    try:
        with new.open("xb") as stream:  # with the permissions of any new file
            stream.write(data)
        if file.exists():
            new.chmod(file.stat().st_mode & 0o7777)
        new.replace(file)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
