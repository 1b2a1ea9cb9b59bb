"""A tiny model with room for the documents' lengths, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_ext.workflow.convert import ConvertOptions, convert
from tiny_models import save_tiny


@pytest.fixture(scope="session")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 8192 positions."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return save_tiny(folder, max_position_embeddings=8192)


@pytest.fixture(scope="session")
def checkpoint(long_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "ckpt"
    return convert(long_tiny, folder, ConvertOptions()).folder
