"""The folder of a run's checkpoints: one run at a time writes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, ModelError
from ..models.folder_cache import owned

__all__ = ["own_work_folder", "unwritable"]


@contextlib.contextmanager
def own_work_folder(folder: Path) -> Iterator[None]:
    """Make `folder` this process's while it is entered; the lock dies with the process.

    Raises ConfigError if another process has it, ModelError if it cannot be made.
    """
    taken = ConfigError(
        f"{folder}: another run with the same data and settings writes its checkpoints there; wait "
        "for it, or give each run its own --work-dir"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    with owned(folder, taken):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # a run that was refused leaves nothing


def unwritable(folder: Path, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())
    return ModelError(
        f"{folder}: the checkpoint cannot be written ({reason}); free space, or give another "
        "--work-dir"
    )
