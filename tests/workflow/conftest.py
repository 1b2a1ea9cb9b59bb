"""A tiny model with room for the documents' lengths, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import Capture, make, tokens_of

from specdec_ext.cli import main
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


@pytest.fixture(scope="session")
def external(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "external"
    return make(checkpoint, folder, "--max_draft_len=10",
                "--speculative_decoding_mode=draft_tokens_external")  # fmt: skip


@pytest.fixture
def plain_tokens(long_tiny: Path, capsys: Capture) -> list[int]:
    assert main(["generate", f"--model={long_tiny}", "--input_text", "abcabc", "--json",
                 "--max_output_len=12"]) == 0  # fmt: skip
    return tokens_of(capsys.readouterr().out)
