"""Drafters in Python, and the seam between them and the engine."""

from __future__ import annotations

from typing import Any

from ..config.methods import DrafterConfig, MedusaDecodingConfig, ReDrafterDecodingConfig
from .draft_target.draft_sizes import DraftSizes
from .draft_target.slots import DraftTargetDrafter
from .eagle3.checkpoint import Eagle3Weights, read_eagle3
from .eagle3.checkpoint import taps_of as check_eagle3
from .eagle3.slots import feature_bytes, make_eagle3
from .late import LateDrafter
from .proposal import Proposal, random_uniform
from .shared_tokens import find_shared_tokens
from .shipped import draft_folder_of, folder_of, shipped_drafter
from .slot_drafter import DraftInputs, PromptInputs, SlotDrafter
from .vocabulary import map_vocabulary

__all__ = [
    "DraftInputs",
    "DraftSizes",
    "DraftTargetDrafter",
    "Eagle3Weights",
    "LateDrafter",
    "PromptInputs",
    "Proposal",
    "SlotDrafter",
    "check_eagle3",
    "draft_folder_of",
    "feature_bytes",
    "find_shared_tokens",
    "folder_of",
    "make_drafter",
    "make_eagle3",
    "map_vocabulary",
    "random_uniform",
    "read_eagle3",
    "shipped_drafter",
]


def make_drafter(
    config: DrafterConfig, model: Any, *, max_requests: int, allow_pickle: bool = False
) -> SlotDrafter:
    """The drafter that `config` describes.

    model         the target, a StepModel
    max_requests  slots of the engine

    Raises ConfigError or ModelError before anything runs when the two do not fit.
    """
    if isinstance(config, ReDrafterDecodingConfig):
        from .redrafter.slots import RedrafterDrafter

        return RedrafterDrafter(config, model, max_requests=max_requests, allow_pickle=allow_pickle)
    if isinstance(config, MedusaDecodingConfig):
        from .medusa.slots import MedusaDrafter

        return MedusaDrafter(config, model, max_requests=max_requests, allow_pickle=allow_pickle)
    raise AssertionError(f"no drafter for {type(config).__name__}")
