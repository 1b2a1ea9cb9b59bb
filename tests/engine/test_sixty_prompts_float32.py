"""Sixty real prompts in float32: drafters == plain decoding == transformers, token for token.

A file per data type, so that two processes share the work of `make test-slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from default_model_cases import DRAFTERS, Decoder, check_sixty_prompts, peer_texts, sixty_prompts

pytestmark = [pytest.mark.default_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def decoder(default_model_path: Path) -> Decoder:
    return Decoder(default_model_path, "float32")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sixty_prompts(decoder: Decoder, drafter: str) -> None:
    check_sixty_prompts(decoder, drafter)


@pytest.mark.filterwarnings("default")
def test_sixty_prompts_equal_transformers(decoder: Decoder) -> None:
    prompts = sixty_prompts(decoder)
    assert decoder.plain_texts(prompts, 64) == peer_texts(decoder, prompts, 64)
