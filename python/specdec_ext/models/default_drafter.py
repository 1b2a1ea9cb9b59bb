"""Drafters that borrow from their target, as folders that a draft model is loaded from."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError
from ..log import logger
from .default import default_model, is_default_model
from .drafter_files import DRAFTER_FILE, is_borrowing, write_drafter_model
from .fingerprint import model_sha256
from .folder_cache import cache_root, cached_folder, remembered_sha256
from .json_file import read_json

__all__ = ["SHIPPED_DRAFTER", "default_drafter", "draft_model_folder"]

SHIPPED_DRAFTER = Path(__file__).resolve().parent.parent / "data" / "drafter"


def default_drafter() -> Path:
    """The folder of the shipped drafter, put together with the default model's embeddings once.

    Raises ModelError when this installation ships none, or as default_model() does.
    """
    if not (SHIPPED_DRAFTER / DRAFTER_FILE).is_file():
        raise ModelError(
            f"{SHIPPED_DRAFTER}: this installation ships no drafter; train one with "
            "'specdec train-drafter', or name a draft model"
        )
    return _put_together(SHIPPED_DRAFTER, default_model())


def draft_model_folder(draft: str | Path, target: Path) -> Path:
    """`draft` itself; of what `specdec train-drafter` wrote the model folder that it makes with the
    target's embeddings, below the cache root. Raises ModelError when the two do not fit."""
    folder = Path(draft).expanduser()
    if not is_borrowing(folder):
        return folder
    return _put_together(folder, default_model() if is_default_model(target) else target)


def _put_together(drafter: Path, target: Path) -> Path:
    """The folder's name holds both sha256: another drafter or target is another folder."""
    origin = {
        "drafter_sha256": remembered_sha256(drafter / DRAFTER_FILE),
        "config_sha256": remembered_sha256(drafter / "config.json"),
        "target_sha256": model_sha256(target),
    }
    made_for = read_json(drafter / "config.json", "the drafter's configuration").get("model_sha256")
    if made_for and made_for != origin["target_sha256"]:
        logger.warning("%s: trained for other weights than %s: it may guess badly", drafter, target)
    name = f"{target.name}-{origin['drafter_sha256'][:16]}-{origin['target_sha256'][:8]}"
    return cached_folder(
        cache_root() / "drafters" / name,
        origin,
        lambda folder: write_drafter_model(drafter, target, folder),
    )
