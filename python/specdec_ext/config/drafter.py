"""What the configurations of Python drafters have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .base import SpeculationOptions

__all__ = ["DrafterConfig"]


@dataclass(frozen=True)
class DrafterConfig(SpeculationOptions):
    """Base of the methods whose drafts come from Python: a draft model, heads, a user's drafter.

    Subclasses have, as fields or properties, `max_draft_len` (nodes of one step besides the golden
    token, 1..127), `max_draft_path_len` (the most drafts that one step can accept) and `adaptive`.
    """

    method: ClassVar[str] = ""
    # Other projects' spellings of the fields, and the words for this method in messages.
    aliases: ClassVar[Mapping[str, str]] = {}
    words: ClassVar[str] = ""

    if TYPE_CHECKING:  # fields of the subclasses

        @property
        def adaptive(self) -> bool: ...
        @property
        def max_draft_path_len(self) -> int: ...

    @classmethod
    def normalize_keys(cls, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """`values` as read from a dict or file, less the keys that mean more than another name."""
        return dict(values)
