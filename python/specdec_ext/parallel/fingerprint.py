"""Do two ranks run the same program on the same files?"""

from __future__ import annotations

import hashlib
from pathlib import Path

from .. import _core
from ..errors import ModelError

__all__ = ["model_fingerprint", "program_fingerprint"]

_FILES = (".json", ".safetensors", ".bin", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def program_fingerprint() -> str:
    """Version and build of this package."""
    build = hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()
    return f"specdec_ext {_core.__version__}, build {build[:12]}"


def model_fingerprint(path: Path) -> str:
    """Names and sizes of a model's files, and what stands at 64 places of each.

    Not a proof: it finds other models and other versions of one, in a moment. Raises ModelError.
    """
    try:
        files = (
            [f for f in sorted(path.iterdir()) if f.suffix in _FILES] if path.is_dir() else [path]
        )
        digest = hashlib.sha256()
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as opened:
                for sample in range(_SAMPLES):
                    opened.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(opened.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"{path}: {error}; every rank needs the model's files") from error
    return digest.hexdigest()[:24]
