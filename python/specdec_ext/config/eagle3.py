"""EAGLE-3: one decoder layer on the target's own hidden states drafts trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError
from .base import MODEL_SPELLINGS, Spellings
from .draft_target import DraftTargetDecodingConfig
from .grown_tree import GrownTreeConfig
from .validate import check_bool, show

__all__ = ["Eagle3DecodingConfig"]


@dataclass(frozen=True)
class Eagle3DecodingConfig(GrownTreeConfig):
    """Drafts from an EAGLE-3 head that was trained for the target.

    model             folder of the head (config.json, safetensors), as SpecForge or `speculators`
                      writes it; None: the one that is shipped for the built-in default model
    max_draft_len     nodes of one step's tree, 1..127
    top_k             how many continuations each node gets, and how many nodes of a level are
                      opened; 1: a chain
    max_draft_depth   levels of a tree, 1..max_draft_len, each a pass of the head. None: 4, or as
                      many as the nodes (max_draft_len) and the 128 rows of a pass allow; for a
                      chain max_draft_len
    adaptive          True: draft only as far as it pays. The engine weighs the head's own
                      probabilities against the measured time of its passes and of verifying.
                      False: always the whole tree
    use_draft_logits  True: sampled requests with acceptance="rejection" draw a chain's drafts from
                      the head's distribution and accept by it. False, and in trees: they propose
                      the likeliest tokens and accept them with the target's probability

    Whatever the head says, greedy output is the target's own and sampled output has the target's
    distribution. Raises ConfigError.
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
        if model is not None and (not isinstance(model, (str, Path)) or not str(model)):
            raise ConfigError(
                f"{where}model = {show(model)}: expected the folder of an EAGLE-3 head "
                f"(config.json and safetensors), got {type(model).__name__}; "
                "`specdec train-eagle3` makes one, and None is the one that is shipped for the "
                "default model"
            )
        self._check_tree("head")
        self._set(model=None if model is None else str(model))
        for name in ("adaptive", "use_draft_logits"):
            check_bool(where + name, getattr(self, name), ConfigError)
        self._check_options()

    @classmethod
    def normalize_keys(cls, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Other projects count levels, nodes and the golden token as for a draft model."""
        return DraftTargetDecodingConfig.normalize_keys(values)
