"""Drafters in Python, and the seam between them and the engine."""

from __future__ import annotations

from typing import Any

from ..config.methods import (
    DrafterConfig,
    MedusaDecodingConfig,
    ReDrafterDecodingConfig,
    UserDrafterConfig,
)
from .base import Drafter, DraftRequest, Proposal
from .draft_target.drafter import DraftTargetDrafter
from .draft_target.slots import StepDraftTarget
from .session import DraftSession
from .step_drafter import DraftInputs, PromptInputs, StepDrafter
from .vocabulary import map_vocabulary

__all__ = [
    "DraftInputs",
    "DraftRequest",
    "DraftSession",
    "DraftTargetDrafter",
    "Drafter",
    "PromptInputs",
    "Proposal",
    "StepDraftTarget",
    "StepDrafter",
    "make_drafter",
    "make_step_drafter",
    "map_vocabulary",
]


def make_drafter(config: DrafterConfig, model: Any, *, allow_pickle: bool = False) -> Drafter:
    """The drafter that `config` describes, for the target `model` (a StepModel).

    Raises ConfigError or ModelError before anything runs when the two do not fit.
    """
    if isinstance(config, UserDrafterConfig):
        from .user import UserDrafter

        return UserDrafter(config, model.vocab_size)
    if isinstance(config, MedusaDecodingConfig):
        from .medusa.drafter import MedusaDrafter

        return MedusaDrafter(config, model, allow_pickle=allow_pickle)
    if isinstance(config, ReDrafterDecodingConfig):
        from .redrafter.drafter import RedrafterDrafter

        return RedrafterDrafter(config, model, allow_pickle=allow_pickle)
    raise AssertionError(f"no drafter for {type(config).__name__}")


def make_step_drafter(
    config: DrafterConfig, model: Any, *, max_requests: int, allow_pickle: bool = False
) -> StepDrafter:
    """The drafter that `config` describes, for steps that run ahead.

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
    raise AssertionError(f"no drafter that runs ahead for {type(config).__name__}")
