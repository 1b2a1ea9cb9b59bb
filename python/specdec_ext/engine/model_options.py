"""LLM's arguments that decide which models are loaded and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.engine import KvCacheConfig, SchedulerConfig
from ..config.parse import SpeculativeConfig
from ..config.quantization import Quantization

if TYPE_CHECKING:
    from ..models.base import StepModel
    from ..parallel.team import Team

__all__ = ["ModelOptions"]


@dataclass(frozen=True)
class ModelOptions:
    """These arguments, checked.

    device  where all of them run
    loader  in the place of models.load_model, with its arguments
    team    the ranks that the model, but no drafter, is spread over; None: this process alone
    """

    path: Path
    speculative_config: SpeculativeConfig | None
    kv_cache_config: KvCacheConfig
    scheduler_config: SchedulerConfig
    dtype: str
    model_impl: str
    allow_pickle: bool
    device: str = "cpu"
    numerics: str = "auto"
    quantization: Quantization | None = None
    loader: Callable[..., StepModel] | None = None
    team: Team | None = None
