"""Building an engine and decoding with it, by the commands that the documents name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_ext.cli import main

Capture = pytest.CaptureFixture[str]
LIMITS = ["--max_batch_size=4", "--max_input_len=64", "--max_seq_len=96"]


def make(checkpoint: Path, folder: Path, *more: str) -> Path:
    command = ["build", f"--checkpoint_dir={checkpoint}", f"--output_dir={folder}", *LIMITS, *more]
    assert main(command) == 0
    return folder


def generate(engine: Path, *more: str, text: str = "abcabc", tokens: int = 12) -> int:
    command = ["generate", f"--engine_dir={engine}", "--input_text", text, "--json"]
    return main([*command, f"--max_output_len={tokens}", *more])


def tokens_of(said: str) -> list[int]:
    return list(json.loads(said.splitlines()[-1])["token_ids"])
