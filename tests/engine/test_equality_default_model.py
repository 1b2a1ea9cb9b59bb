"""The built-in model on real prompts: every drafter == plain decoding, and plain == transformers.

Tokens are compared one by one, in float32 and as LLM() runs it, with K/V of 8 bits too, in batches
of 1 and 3, with several page sizes; pages start as NaN, so that a stale or foreign entry shows. A
few prompts here; sixty per data type and drafter in test_sixty_prompts_*.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from default_model_cases import DRAFTERS, Decoder, peer_texts

from combinations import mixed

pytestmark = pytest.mark.default_model

TOKENS = 40
MESSAGES = [
    "Repeat this list three times, one item per line: apple, pear, plum, cherry.",
    "Write a Python function that returns the sum of the squares of a list, and its docstring.",
    "The ferry leaves Harwich at nine in the evening and arrives in Hook of Holland at eight in "
    "the morning. It carries cars, lorries and foot passengers. Summarize the text, then quote its "
    "first sentence.",
]


@pytest.fixture(scope="module", params=["float32", "q4_1", "q4_1-fp8", "q4_1-int8"])
def decoder(request: pytest.FixtureRequest, default_model_path: Path) -> Decoder:
    return Decoder(default_model_path, *request.param.split("-"))


SHAPES = [(1, 16), (3, 2)]  # batch, page


@pytest.mark.parametrize(("drafter", "shape"), mixed(DRAFTERS, SHAPES))
def test_drafter_equals_plain(decoder: Decoder, drafter: str, shape: tuple[int, int]) -> None:
    prompts = [decoder.encode(message) for message in MESSAGES]
    expected = decoder.plain_texts(prompts, TOKENS)
    texts, accepted = decoder.decode(prompts, TOKENS, *shape, **DRAFTERS[drafter])
    assert texts == expected
    assert accepted > 0, "no draft was ever accepted: the equality says nothing"


def test_batched_plain_equals_solo_plain(decoder: Decoder) -> None:
    prompts = [decoder.encode(message) for message in MESSAGES]
    for batch, page in ((3, 1), (3, 64)):
        texts, _ = decoder.decode(prompts, TOKENS, batch, page)
        assert texts == decoder.plain_texts(prompts, TOKENS)


@pytest.mark.filterwarnings("default")
def test_plain_equals_transformers(decoder: Decoder) -> None:
    if decoder.model.kv_dtype != torch.float32:
        return  # transformers has no such weights
    prompts = [decoder.encode(message) for message in MESSAGES]
    assert decoder.plain_texts(prompts, TOKENS) == peer_texts(decoder, prompts, TOKENS)
