"""ReDrafter: beams of a recurrent drafter that reads the target's hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import ConfigError
from .base import MODEL_SPELLINGS, Spellings
from .drafter import DrafterConfig
from .limits import MAX_DRAFT_LEN
from .validate import check_bool, check_int, show

__all__ = ["ReDrafterDecodingConfig"]


@dataclass(frozen=True)
class ReDrafterDecodingConfig(DrafterConfig):
    """Drafts from a recurrent drafter trained for the target, as beams merged into one tree.

    model               folder of the drafter (config.json, model.safetensors); None: the one that
                        is shipped for the built-in default model
    num_beams           beams that the search keeps, >= 1
    draft_len_per_beam  drafts of each beam, >= 1, without the token that is decided already. The
                        engine verifies at most num_beams * draft_len_per_beam drafts, limit 127
    greedy_search       True: the drafter's likeliest beams. False: a sampled request's temperature
                        divides the drafter's scores
    adaptive            True: verify only the drafts that are expected to pay; False: the whole tree

    Both numbers are limits: a request may ask for less (SamplingParams.redrafter_num_beams,
    redrafter_draft_len_per_beam). Raises ConfigError.
    """

    method: ClassVar[str] = "redrafter"
    words: ClassVar[str] = "ReDrafter"
    aliases: ClassVar[Mapping[str, str]] = {
        "redrafter_model": "model",
        "drafter_model_dir": "model",
        "speculative_draft_model_path": "model",
        "redrafter_num_beams": "num_beams",
        "beam_width": "num_beams",
        "redrafter_draft_len_per_beam": "draft_len_per_beam",
        "draft_len": "draft_len_per_beam",
        "redrafter_greedy_search": "greedy_search",
    }

    spellings: ClassVar[Spellings] = MODEL_SPELLINGS

    model: str | Path | None = None
    num_beams: int = 5
    draft_len_per_beam: int = 5
    greedy_search: bool = True
    adaptive: bool = True

    def __post_init__(self) -> None:
        where = "ReDrafterDecodingConfig."
        if self.model is not None and (
            not isinstance(self.model, (str, Path)) or not str(self.model)
        ):
            raise ConfigError(
                f"{where}model = {show(self.model)}: expected the path of a drafter's folder, or "
                "None for the one shipped for the default model"
            )
        beams = check_int(where + "num_beams", self.num_beams, ConfigError,
                          low=1, high=MAX_DRAFT_LEN)  # fmt: skip
        length = check_int(where + "draft_len_per_beam", self.draft_len_per_beam, ConfigError,
                           low=1, high=MAX_DRAFT_LEN)  # fmt: skip
        if beams * length > MAX_DRAFT_LEN:
            raise ConfigError(
                f"{where}num_beams = {beams} with draft_len_per_beam = {length}: up to "
                f"{beams * length} drafts in one step, limit {MAX_DRAFT_LEN}; lower one of them"
            )
        self._set(num_beams=beams, draft_len_per_beam=length)
        check_bool(where + "greedy_search", self.greedy_search, ConfigError)
        check_bool(where + "adaptive", self.adaptive, ConfigError)
        self._check_options()

    @property
    def max_draft_len(self) -> int:
        """Drafts of one step: beams that share nothing."""
        return self.num_beams * self.draft_len_per_beam

    @property
    def max_draft_path_len(self) -> int:
        """The most that one step can accept."""
        return self.draft_len_per_beam
