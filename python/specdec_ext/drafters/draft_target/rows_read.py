"""Rows that a draft model reads of each request in a step's first pass, on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...config.methods import DraftTargetDecodingConfig

__all__ = ["CHAIN_READS", "rows_read"]

# Each text's last two tokens: the golden one, and the one before, which is new to the model if all
# drafts were accepted.
CHAIN_READS = 2


def rows_read(config: DraftTargetDecodingConfig) -> int:
    """Most rows of one request in a pass: for a tree, what a step can have added to its text."""
    return CHAIN_READS if config.top_k == 1 else config.max_draft_path_len + 1
