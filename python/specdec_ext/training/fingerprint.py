"""Which model is it? The sha256 of its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import ModelError
from ..models.folder_cache import file_sha256

__all__ = ["model_sha256"]


def model_sha256(folder: Path) -> str:
    """sha256 of a model folder's weight files, in the order of their names."""
    files = sorted(Path(folder).glob("*.safetensors")) or sorted(Path(folder).glob("*.bin"))
    if not files:
        raise ModelError(f"{folder}: holds no weight file (*.safetensors)")
    if len(files) == 1:
        return file_sha256(files[0])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file_sha256(file).encode())
    return digest.hexdigest()
