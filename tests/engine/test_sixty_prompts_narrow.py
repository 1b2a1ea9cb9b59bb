"""Sixty real prompts with 16- and 4-bit weights: drafters == plain decoding, token for token.

A file for these and one for float32, so that two processes share the work of `make test-slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from default_model_cases import DRAFTERS, Decoder, check_sixty_prompts

pytestmark = [pytest.mark.default_model, pytest.mark.slow]


@pytest.fixture(scope="module", params=["bfloat16", "q4_1"])
def decoder(request: pytest.FixtureRequest, default_model_path: Path) -> Decoder:
    return Decoder(default_model_path, request.param)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sixty_prompts(decoder: Decoder, drafter: str) -> None:
    check_sixty_prompts(decoder, drafter)
