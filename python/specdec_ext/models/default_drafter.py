"""The small drafter that is shipped for the built-in default model, as a model folder."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError
from .default import MODEL_NAME, default_model
from .drafter_files import DRAFTER_FILE, write_drafter_model
from .folder_cache import cache_root, cached_folder, file_sha256, recorded_sha256

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
    digest = file_sha256(source)
    target = default_model()
    return cached_folder(
        cache_root() / "drafters" / f"{MODEL_NAME}-{digest[:16]}",
        {"drafter_sha256": digest, "target_sha256": recorded_sha256(target, "model.safetensors")},
        lambda folder: write_drafter_model(SHIPPED_DRAFTER, target, folder),
    )
