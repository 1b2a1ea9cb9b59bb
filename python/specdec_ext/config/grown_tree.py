"""Trees that a drafter grows level by level, a pass each: of a draft model, of an EAGLE-3 head."""

from __future__ import annotations

from ..errors import ConfigError
from .engine import MAX_STEP_TOKENS
from .medusa_choices import MAX_TOP_K
from .validate import check_int

__all__ = ["MAX_TOP_K", "levels_of", "rows_of_pass"]


def rows_of_pass(top_k: int, depth: int) -> int:
    """Rows of a request in the drafter's last pass: the golden token and the opened nodes."""
    return 1 if top_k == 1 else 1 + top_k * (depth - 1)


def levels_of(where: str, asked: int | None, *, length: int, top_k: int, drafter: str) -> int:
    """Returns `max_draft_depth` of a tree of `length` nodes, 1..length.

    asked    what the user says; None: 4, or `length` if that is less; of a chain `length`
    where    for errors: the configuration's name and a dot
    drafter  for errors: whose passes they are

    Raises ConfigError.
    """
    if asked is None:
        return length if top_k == 1 else min(4, length)
    depth = check_int(where + "max_draft_depth", asked, ConfigError, low=1, high=length)
    if top_k == 1 and depth != length:
        raise ConfigError(
            f"{where}max_draft_depth = {depth} with top_k = 1 and max_draft_len = {length}: a "
            "chain is as deep as it is long; leave max_draft_depth out, or raise top_k"
        )
    if (rows := rows_of_pass(top_k, depth)) > MAX_STEP_TOKENS:
        raise ConfigError(
            f"{where}top_k = {top_k} with max_draft_depth = {depth} needs {rows} rows in the "
            f"{drafter}'s last pass, limit {MAX_STEP_TOKENS}; lower one of them"
        )
    return depth
