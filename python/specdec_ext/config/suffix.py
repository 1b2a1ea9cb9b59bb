"""Configuration of suffix decoding; checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ConfigError
from .base import SpeculationOptions
from .limits import MAX_DRAFT_LEN
from .validate import check_bool, check_float, check_int

__all__ = ["SUFFIX_ALIASES", "SuffixDecodingConfig"]

MAX_TREE_DEPTH = 64  # kMaxSuffixDepth in cpp/algo/suffix_draft.h
MAX_CACHED_REQUESTS = 1_000_000

# vLLM's names; arctic-inference has those without the prefix.
SUFFIX_ALIASES = {
    "num_speculative_tokens": "max_draft_len",
    "max_spec_tokens": "max_draft_len",
    "suffix_decoding_max_tree_depth": "max_tree_depth",
    "max_depth": "max_tree_depth",
    "suffix_decoding_max_cached_requests": "max_cached_requests",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
}


@dataclass(frozen=True)
class SuffixDecodingConfig(SpeculationOptions):
    """Suffix decoding: drafts are a tree of what followed earlier occurrences of the last tokens.

    max_draft_len        the most drafts of a step, 1..127 (alias num_speculative_tokens)
    max_tree_depth       the most tokens over which two places of the text are compared, and the
                         deepest draft, 1..64
    max_spec_factor      the most drafts per token of the longest match, 0 < factor <= 128; None:
                         the probabilities alone decide
    min_token_prob       make a draft only if the estimated probability that it and all drafts above
                         it are accepted is at least this, 0..1
    max_cached_requests  also search the outputs of this many earlier requests with the same
                         `cache_salt`, 0..1,000,000, and at most 65,536 tokens of them. 0: search
                         only the request's own text
    adaptive             True: the draft budget takes the drafts that pay; False: all are verified

    and the options of every method (SpeculationOptions). vLLM's names with the prefix
    `suffix_decoding_` are accepted in dicts.
    """

    method: ClassVar[str] = "suffix"

    max_draft_len: int = 24
    max_tree_depth: int = 24
    max_spec_factor: float | None = None
    min_token_prob: float = 0.1
    max_cached_requests: int = 0
    adaptive: bool = True

    def __post_init__(self) -> None:
        where = "SuffixDecodingConfig."
        limits = {"max_draft_len": MAX_DRAFT_LEN, "max_tree_depth": MAX_TREE_DEPTH}
        for name, high in limits.items():
            value = check_int(where + name, getattr(self, name), ConfigError, low=1, high=high)
            self._set(**{name: value})
        if self.max_spec_factor is not None:
            factor = check_float(
                where + "max_spec_factor", self.max_spec_factor, ConfigError,
                above=0.0, high=128.0, remedy="None: no such limit",
            )  # fmt: skip
            self._set(max_spec_factor=factor)
        least = check_float(
            where + "min_token_prob", self.min_token_prob, ConfigError, low=0.0, high=1.0
        )
        self._set(min_token_prob=least)
        cached = check_int(
            where + "max_cached_requests", self.max_cached_requests, ConfigError, low=0,
            high=MAX_CACHED_REQUESTS,
        )  # fmt: skip
        self._set(max_cached_requests=cached)
        check_bool(where + "adaptive", self.adaptive, ConfigError)
        self._check_options()

    @property
    def max_draft_path_len(self) -> int:
        """Drafts on one root-to-leaf path: the most that one step can accept."""
        return min(self.max_draft_len, self.max_tree_depth)

    @property
    def lookup(self) -> Mapping[str, Any]:
        """The executor's keyword `suffix`."""
        names = ("max_draft_len", "max_tree_depth", "max_spec_factor", "min_token_prob")
        return {name: getattr(self, name) for name in names}
