"""Trees that a drafter grows level by level, a pass each: of a draft model, of an EAGLE-3 head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError
from .drafter import DrafterConfig
from .limits import MAX_DRAFT_LEN, MAX_STEP_TOKENS
from .medusa_choices import MAX_TOP_K
from .validate import check_int

__all__ = ["GrownTreeConfig"]


class GrownTreeConfig(DrafterConfig):
    """Base of the configurations whose fields max_draft_len, top_k and max_draft_depth say what is
    grown."""

    if TYPE_CHECKING:  # fields of the subclasses
        max_draft_len: int
        top_k: int
        max_draft_depth: int | None

    min_confidence = 0.0  # of a draft, or nothing is drafted behind it; draft models have a field

    @property
    def max_draft_path_len(self) -> int:
        """The most that one step can accept."""
        assert self.max_draft_depth is not None
        return self.max_draft_depth

    @property
    def rows_of_pass(self) -> int:
        """Rows of a request in the drafter's last pass: the golden token and the opened nodes."""
        return _rows_of_pass(self.top_k, self.max_draft_path_len)

    def _check_tree(self, drafter: str) -> None:
        """Check the three numbers, and give max_draft_depth, where it is None, its value: 4, or
        less where the tree has fewer nodes or a pass too few rows; of a chain max_draft_len.

        drafter  for errors: whose passes they are

        Raises ConfigError.
        """
        where = type(self).__name__ + "."
        length = check_int(where + "max_draft_len", self.max_draft_len, ConfigError,
                           low=1, high=MAX_DRAFT_LEN)  # fmt: skip
        top_k = check_int(where + "top_k", self.top_k, ConfigError, low=1, high=MAX_TOP_K)
        if self.max_draft_depth is None:
            widest = 1 + (MAX_STEP_TOKENS - 1) // top_k  # levels of passes that have enough rows
            depth = length if top_k == 1 else min(4, length, widest)
        else:
            depth = check_int(where + "max_draft_depth", self.max_draft_depth, ConfigError,
                              low=1, high=length)  # fmt: skip
        if top_k == 1 and depth != length:
            raise ConfigError(
                f"{where}max_draft_depth = {depth} with top_k = 1 and max_draft_len = {length}: a "
                "chain is as deep as it is long; leave max_draft_depth out, or raise top_k"
            )
        if (rows := _rows_of_pass(top_k, depth)) > MAX_STEP_TOKENS:
            raise ConfigError(
                f"{where}top_k = {top_k} with max_draft_depth = {depth} needs {rows} rows in the "
                f"{drafter}'s last pass, limit {MAX_STEP_TOKENS}; lower one of them"
            )
        self._set(max_draft_len=length, top_k=top_k, max_draft_depth=depth)


def _rows_of_pass(top_k: int, depth: int) -> int:
    return 1 if top_k == 1 else 1 + top_k * (depth - 1)
