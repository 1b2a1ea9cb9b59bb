"""What a view of a checkpoint under other names, or of a rank's rows, passes on as it is."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["CheckpointView"]

# The checkpoint beneath has warnings, bytes_read, drop_pages() and __exit__ (weights.Checkpoint).
FilesT = TypeVar("FilesT", bound=Any)
ViewT = TypeVar("ViewT", bound="CheckpointView[Any]")


class CheckpointView(Generic[FilesT]):
    """A checkpoint that reads its tensors from `files`, another one. Views give check(), load() and
    weight() of their own."""

    def __init__(self, files: FilesT) -> None:
        self.files = files

    def __enter__(self: ViewT) -> ViewT:
        return self

    def __exit__(self, *exc: object) -> None:
        self.files.__exit__(*exc)

    @property
    def warnings(self) -> list[str]:
        """See Checkpoint."""
        warnings: list[str] = self.files.warnings
        return warnings

    @property
    def bytes_read(self) -> int:
        """See Checkpoint."""
        count: int = self.files.bytes_read
        return count

    def drop_pages(self) -> None:
        """See Checkpoint."""
        self.files.drop_pages()

    def main_format(self) -> str:
        """The type that holds most elements of matrices; of files that have matrices as bytes."""
        found: str = self.files.main_format()
        return found
