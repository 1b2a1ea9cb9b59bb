"""The folder of a run's checkpoints: one run at a time writes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, ModelError

__all__ = ["owned", "unwritable"]


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Make `folder` this process's while it is entered; the lock dies with the process.

    Raises ConfigError if another process has it, ModelError if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another run with the same data and settings writes its checkpoints "
                "there; wait for it, or give each run its own --work-dir"
            ) from None
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # a run that was refused leaves nothing
        os.close(handle)


def unwritable(folder: Path, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())
    return ModelError(
        f"{folder}: the checkpoint cannot be written ({reason}); free space, or give another "
        "--work-dir"
    )
