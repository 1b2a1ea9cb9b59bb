"""Models: how a checkpoint folder becomes a StepModel.

`load_model(path)` gives the native decoder or the transformers adapter; `default_model()` is the
folder of the built-in model. Imports are lazy: naming this package costs no torch import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import ModelInfo, StepModel
    from .default import default_model
    from .load import load_model

__all__ = ["ModelInfo", "StepModel", "default_model", "load_model"]

_HOME = {
    "ModelInfo": "base",
    "StepModel": "base",
    "default_model": "default",
    "load_model": "load",
}

if not TYPE_CHECKING:  # a type checker shall see no name that is not there

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
