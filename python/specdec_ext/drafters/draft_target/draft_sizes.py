"""Sizes of an engine that drafts with a draft model, and the rows that this reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...config.methods import DraftTargetDecodingConfig

__all__ = ["CHAIN_READS", "DraftSizes", "TextReads", "rows_read"]


class DraftSizes(NamedTuple):
    """vocab_size    of the target
    max_requests  slots of the engine
    max_rows      of a step of the engine, and of one pass of the draft model
    """

    vocab_size: int
    max_requests: int
    max_rows: int


class TextReads(NamedTuple):
    """What a drafter on a device reads of a text.

    max_len  tokens that it serves
    last     so many tokens, the golden one last, are read in every step
    first    the position of its first row
    """

    max_len: int
    last: int
    first: int = 0


# Each text's last two tokens: the golden one, and the one before, which is new to the model if all
# drafts were accepted.
CHAIN_READS = 2


def rows_read(config: DraftTargetDecodingConfig) -> int:
    """Most rows of one request in a pass: for a tree, what a step can have added to its text."""
    return CHAIN_READS if config.top_k == 1 else config.max_draft_path_len + 1
