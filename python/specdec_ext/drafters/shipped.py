"""Heads and drafters that come with the package, trained for the built-in default model."""

from __future__ import annotations

from pathlib import Path

from ..config.methods import (
    DrafterConfig,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    ReDrafterDecodingConfig,
)
from ..errors import ConfigError
from ..models.default import is_default_model
from ..models.default_drafter import default_drafter, draft_model_folder
from ..models.place import Place

__all__ = ["draft_folder_of", "folder_of", "shipped_drafter"]

_ROOT = Path(__file__).resolve().parent.parent / "data"


def folder_of(config: ReDrafterDecodingConfig | Eagle3DecodingConfig) -> Path:
    """config.model, or the folder of what is shipped for the method.

    Raises ConfigError when this installation ships none.
    """
    if config.model is not None:
        return Path(config.model)
    folder = _ROOT / config.method
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{config.method}: no trained weights are shipped in this installation ({folder} is "
            "not there); give the folder of your own as `model`"
        )
    return folder


def draft_folder_of(config: DraftTargetDecodingConfig, target: Path) -> Path:
    """The folder of config.model for this target, or of the draft model shipped for it.

    Raises ConfigError when none is shipped for the target, ModelError as default_drafter() and
    draft_model_folder() do.
    """
    if config.model is not None:
        return draft_model_folder(config.model, target)
    if not is_default_model(target):
        raise ConfigError(
            "DraftTargetDecodingConfig.model = None: the draft model that is shipped is the "
            f"built-in model's, and the target is {str(target)!r}; give the folder of a draft "
            "model with the target's vocabulary as `model`"
        )
    return default_drafter()


def shipped_drafter(model: Path, place: Place, model_impl: str) -> DrafterConfig | None:
    """The one that "auto" takes beside suffix decoding, or None: of those that are shipped for the
    default model the one that was measured to bring most (docs/methods/sources.md).

    model       folder or file of the target
    model_impl  LLM's argument
    """
    shipped = (_ROOT / ReDrafterDecodingConfig.method / "config.json").is_file()
    native = model_impl != "transformers" and place.is_cpu
    return ReDrafterDecodingConfig() if shipped and native and is_default_model(model) else None
