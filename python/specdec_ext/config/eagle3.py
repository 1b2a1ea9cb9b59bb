"""EAGLE-3: one decoder layer on the target's own hidden states drafts trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError
from .base import MODEL_SPELLINGS, Spellings
from .draft_target import DraftTargetDecodingConfig
from .drafter import DrafterConfig
from .engine import MAX_DRAFT_LEN
from .grown_tree import MAX_TOP_K, levels_of, rows_of_pass
from .validate import check_bool, check_int, show

__all__ = ["Eagle3DecodingConfig"]


@dataclass(frozen=True)
class Eagle3DecodingConfig(DrafterConfig):
    """Drafts from an EAGLE-3 head that was trained for the target.

    model             folder of the head (config.json, safetensors), as SpecForge or `speculators`
                      writes it
    max_draft_len     nodes of one step's tree, 1..127
    top_k             likeliest continuations of each node, and nodes of a level that are opened;
                      1: a chain
    max_draft_depth   levels of a tree, 1..max_draft_len, each a pass of the head; None: 4, or
                      max_draft_len if that is less; of a chain max_draft_len
    adaptive          draft only as far as it pays: the head's own probabilities against the
                      measured cost of its passes and of verifying; off: always the whole tree
    use_draft_logits  sampled requests with acceptance="rejection" draw a chain's drafts from the
                      head's distribution and are accepted by it. False, and in trees: the likeliest
                      tokens, accepted by the target's own probability of them

    Greedy output is the target's own whatever the head says; a sampled output has the target's
    law. Raises ConfigError.
    """

    method: ClassVar[str] = "eagle3"
    words: ClassVar[str] = "an EAGLE-3 head"
    aliases: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("eagle3_model", "draft_model", "draft_model_path", "speculative_draft_model",
             "speculative_draft_model_path", "spec_draft_model"),
            "model",
        ),
        **dict.fromkeys(
            ("k", "num_speculative_tokens", "num_draft_tokens", "spec_draft_n_max"),
            "max_draft_len",
        ),
        "speculative_eagle_topk": "top_k",
        "dynamic_tree_max_topk": "top_k",
        "use_draft_probs": "use_draft_logits",
    }  # fmt: skip

    spellings: ClassVar[Spellings] = MODEL_SPELLINGS

    model: str | Path | None = None
    max_draft_len: int = 8
    top_k: int = 4
    max_draft_depth: int | None = None
    adaptive: bool = True
    use_draft_logits: bool = True

    def __post_init__(self) -> None:
        where = "Eagle3DecodingConfig."
        model = self.model
        if not isinstance(model, (str, Path)) or not str(model):
            raise ConfigError(
                f"{where}model = {show(model)}: expected the folder of an EAGLE-3 head "
                f"(config.json and safetensors), got {type(model).__name__}; "
                "`specdec train-eagle3` makes one"
            )
        length = check_int(where + "max_draft_len", self.max_draft_len, ConfigError,
                           low=1, high=MAX_DRAFT_LEN)  # fmt: skip
        top_k = check_int(where + "top_k", self.top_k, ConfigError, low=1, high=MAX_TOP_K)
        self._set(
            model=str(model),
            max_draft_len=length,
            top_k=top_k,
            max_draft_depth=levels_of(
                where, self.max_draft_depth, length=length, top_k=top_k, drafter="head"
            ),
        )
        for name in ("adaptive", "use_draft_logits"):
            check_bool(where + name, getattr(self, name), ConfigError)
        self._check_options()

    @property
    def max_draft_path_len(self) -> int:
        """The most that one step can accept."""
        assert self.max_draft_depth is not None
        return self.max_draft_depth

    @property
    def rows_of_pass(self) -> int:
        """See rows_of_pass()."""
        return rows_of_pass(self.top_k, self.max_draft_path_len)

    @classmethod
    def normalize_keys(cls, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Other projects count levels, nodes and the golden token as for a draft model."""
        return DraftTargetDecodingConfig.normalize_keys(values)
