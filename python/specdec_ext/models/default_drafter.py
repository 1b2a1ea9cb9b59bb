"""The small drafter that is shipped for the built-in default model, as a model folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import ModelError
from .default import MODEL_NAME, cache_root, default_model, locked
from .drafter_files import DRAFT_VOCAB_FILE, DRAFTER_FILE, materialize_drafter

__all__ = ["SHIPPED_DRAFTER", "default_drafter"]

SHIPPED_DRAFTER = Path(__file__).resolve().parent.parent / "data" / "drafter"


def default_drafter() -> Path:
    """The folder of the shipped drafter, put together with the target's embeddings once.

    The folder's name holds the shipped file's sha256: another release is another folder. Raises
    ModelError when this installation ships none, or as default_model() does.
    """
    source = SHIPPED_DRAFTER / DRAFTER_FILE
    if not source.is_file():
        raise ModelError(
            f"{SHIPPED_DRAFTER}: this installation ships no drafter; train one with "
            "'specdec train-drafter', or name a draft model"
        )
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    target = default_model()
    folder = cache_root() / "drafters" / f"{MODEL_NAME}-{digest[:16]}"
    if not _is_complete(folder):
        with locked(folder.parent):
            if not _is_complete(folder):
                materialize_drafter(SHIPPED_DRAFTER, target, folder)
    return folder


def _is_complete(folder: Path) -> bool:
    """materialize_drafter() renames a complete folder into place."""
    return (folder / DRAFT_VOCAB_FILE).is_file() and (folder / "config.json").is_file()
