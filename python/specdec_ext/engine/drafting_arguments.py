"""A speculative configuration as the executor's keywords."""

from __future__ import annotations

from typing import Any

from ..config.lookahead import LookaheadDecodingConfig
from ..config.methods import DrafterConfig, UserDrafterConfig
from ..config.parse import SpeculativeConfig
from ..config.sources import CompositeDecodingConfig
from ..config.suffix import SuffixDecodingConfig

__all__ = ["drafting_arguments"]

# Fields of NGramDecodingConfig that the executor takes by their names.
_NGRAM = (
    "max_draft_len", "max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool",
)  # fmt: skip


def _suffix_arguments(config: SuffixDecodingConfig) -> dict[str, Any]:
    return {
        "suffix": dict(config.lookup),
        "suffix_cached_requests": config.max_cached_requests,
    }


def drafting_arguments(config: SpeculativeConfig | None) -> dict[str, Any]:
    """The executor's keywords for how drafts are made."""
    how: dict[str, Any] = {"method": "none"}
    if isinstance(config, CompositeDecodingConfig):
        how = drafting_arguments(config.drafter)
        how |= {**_suffix_arguments(config.suffix), "with_suffix": True}
        return {**how, "draft_len_schedule": config.draft_len_steps}
    if isinstance(config, LookaheadDecodingConfig):
        # (1,1,0) is plain decoding and must cost no more.
        if not config.is_plain:
            how = {"method": "lookahead", "lookahead": config.triple}
    elif isinstance(config, DrafterConfig):
        how = {
            "method": "proposed",
            "proposed_max_draft_len": config.max_draft_len,
            "proposed_max_path": config.deepest_draft,
            "proposed_by_host": isinstance(config, UserDrafterConfig),
        }
    elif isinstance(config, SuffixDecodingConfig):
        how = {"method": "suffix", **_suffix_arguments(config)}
    elif config is not None:
        how = {"method": "ngram", "ngram": {name: getattr(config, name) for name in _NGRAM}}
    if config is not None:
        how["draft_len_schedule"] = config.draft_len_steps
    return how
