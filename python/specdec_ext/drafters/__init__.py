"""Drafters in Python, and the seam between them and the engine."""

from __future__ import annotations

from typing import Any

from ..config.methods import DrafterConfig, MedusaDecodingConfig, ReDrafterDecodingConfig
from .base import DraftRequest, Proposal
from .draft_target.slots import StepDraftTarget
from .session import DraftSession
from .step_drafter import DraftInputs, PromptInputs, StepDrafter
from .user import UserDrafter
from .vocabulary import map_vocabulary

__all__ = [
    "DraftInputs",
    "DraftRequest",
    "DraftSession",
    "PromptInputs",
    "Proposal",
    "StepDraftTarget",
    "StepDrafter",
    "UserDrafter",
    "make_step_drafter",
    "map_vocabulary",
]


def make_step_drafter(
    config: DrafterConfig, model: Any, *, max_requests: int, allow_pickle: bool = False
) -> StepDrafter:
    """The drafter that `config` describes.

    model         the target, a StepModel
    max_requests  slots of the engine

    Raises ConfigError or ModelError before anything runs when the two do not fit.
    """
    if isinstance(config, ReDrafterDecodingConfig):
        from .redrafter.slots import StepRedrafter

        return StepRedrafter(config, model, max_requests=max_requests, allow_pickle=allow_pickle)
    if isinstance(config, MedusaDecodingConfig):
        from .medusa.slots import StepMedusa

        return StepMedusa(config, model, max_requests=max_requests, allow_pickle=allow_pickle)
    raise AssertionError(f"no drafter for {type(config).__name__}")
