"""Which model is it? The sha256 of its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import ModelError
from .folder_cache import remembered_sha256

__all__ = ["model_sha256"]


def model_sha256(model: Path) -> str:
    """sha256 of a model folder's weight files in the order of their names, or of a GGUF file."""
    model = Path(model)
    if model.is_file():
        return remembered_sha256(model)
    files = sorted(model.glob("*.safetensors")) or sorted(model.glob("*.bin"))
    if not files:
        raise ModelError(f"{model}: holds no weight file (*.safetensors)")
    if len(files) == 1:
        return remembered_sha256(files[0])
    digest = hashlib.sha256()
    for file in files:
        digest.update(remembered_sha256(file).encode())
    return digest.hexdigest()
