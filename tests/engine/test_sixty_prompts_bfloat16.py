"""Sixty real prompts in bfloat16: drafters == plain decoding, token for token.

A file per data type, so that two processes share the work of `make test-slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from default_model_cases import DRAFTERS, Decoder, check_sixty_prompts

pytestmark = [pytest.mark.default_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def decoder(default_model_path: Path) -> Decoder:
    return Decoder(default_model_path, "bfloat16")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sixty_prompts(decoder: Decoder, drafter: str) -> None:
    check_sixty_prompts(decoder, drafter)
