"""Prompt lookup's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigError
from .base import SpeculationOptions
from .limits import MAX_DRAFT_LEN
from .validate import check_bool, check_int

__all__ = ["NGramDecodingConfig"]

# Longest suffix that prompt lookup matches against the history; longer ones cost index memory for
# every token and practically never decide a match (docs/methods/prompt_lookup.md).
MAX_MATCHING_NGRAM_SIZE = 8


@dataclass(frozen=True)
class NGramDecodingConfig(SpeculationOptions):
    """Prompt lookup: drafts are copied from where the last tokens occurred before.

    max_draft_len            K, the most drafts of a step, 1..127 (alias prompt_lookup_num_tokens)
    max_matching_ngram_size  M, the longest suffix that is matched, 1..8; longest first, down to 1
    is_keep_all              keep every continuation of a pattern, not only one
    is_use_oldest            propose the oldest of the kept continuations; False: the newest
    is_public_pool           share patterns among requests with the same `cache_salt`
    adaptive                 True: the draft budget shortens drafts below K; False: always K

    and the options of every method (SpeculationOptions).
    """

    method: ClassVar[str] = "ngram"

    max_draft_len: int = 4
    max_matching_ngram_size: int = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = False
    adaptive: bool = True

    def __post_init__(self) -> None:
        where = "NGramDecodingConfig."
        self._set(
            max_draft_len=check_int(
                where + "max_draft_len", self.max_draft_len, ConfigError, low=1, high=MAX_DRAFT_LEN
            ),
            max_matching_ngram_size=check_int(
                where + "max_matching_ngram_size",
                self.max_matching_ngram_size,
                ConfigError,
                low=1,
                high=MAX_MATCHING_NGRAM_SIZE,
            ),
        )
        for name in ("is_keep_all", "is_use_oldest", "is_public_pool", "adaptive"):
            check_bool(where + name, getattr(self, name), ConfigError)
        self._check_options()

    @property
    def prompt_lookup_num_tokens(self) -> int:
        """transformers' name of max_draft_len."""
        return self.max_draft_len

    @property
    def max_draft_path_len(self) -> int:
        """Drafts on one root-to-leaf path: the most that one step can accept."""
        return self.max_draft_len
