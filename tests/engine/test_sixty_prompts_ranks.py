"""Sixty real prompts on two ranks: every drafter's text is that of plain decoding on one.

The reduced form with tiny models and every method is test_tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from default_model_cases import Decoder, sixty_prompts
from medusa_models import save_heads
from method_cases import Guesses

from model.redrafter_cases import random_drafter
from specdec_ext import (
    LLM,
    DraftTargetDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    SamplingParams,
    SuffixDecodingConfig,
    UserDrafterConfig,
)
from specdec_ext.models.default_drafter import SHIPPED_DRAFTER
from specdec_ext.parallel.team import Team
from tensor_parallel import started_team

pytestmark = [pytest.mark.default_model, pytest.mark.slow]

TOKENS = 32
GREEDY = SamplingParams(max_tokens=TOKENS)
SHIPPED = str(SHIPPED_DRAFTER)
HIDDEN, VOCAB = 576, 49152  # of the default model
# What was never trained drafts, too: what it brings counts less than what it may not change.
DRAFTERS: dict[str, Callable[[Path], Any]] = {
    "none": lambda _: None,
    "lookahead": lambda _: LookaheadDecodingConfig(4, 3, 4, adaptive=False),
    "ngram": lambda _: NGramDecodingConfig(4, 2, adaptive=False),
    "suffix": lambda _: SuffixDecodingConfig(adaptive=False),
    "user": lambda _: UserDrafterConfig(Guesses(), 7, adaptive=False),
    "chain": lambda _: DraftTargetDecodingConfig(SHIPPED, max_draft_len=4, adaptive=False),
    "tree": lambda _: DraftTargetDecodingConfig(
        SHIPPED, max_draft_len=9, top_k=3, max_draft_depth=4, adaptive=False
    ),
    "medusa": lambda root: MedusaDecodingConfig(
        save_heads(root / "heads", hidden=HIDDEN, vocab=VOCAB, number=2, lm_head="target",
                   scale=0.02),
        [[0], [1], [0, 0]], adaptive=False,
    ),
    "redrafter": lambda root: ReDrafterDecodingConfig(
        random_drafter(root / "network", "apple", HIDDEN, VOCAB), 2, 3, adaptive=False
    ),
    "auto": lambda _: "auto",
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(default_model_path: Path) -> list[list[int]]:
    return sixty_prompts(Decoder(default_model_path, "q4_1"))


def texts_of(spec: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    with LLM(
        speculative_config=spec, device="cpu", max_batch_size=20, max_seq_len=1024, **options
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        metrics = llm.get_metrics()
    if spec not in (None, "auto"):
        assert metrics["speculative_decoding"]["num_draft_tokens"] > 0
    return [list(out.outputs[0].token_ids) for out in outputs]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return texts_of(None, prompts)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with started_team() as team:
        yield team


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sixty_prompts(
    team: Team,
    prompts: list[list[int]],
    expected: list[list[int]],
    drafter: str,
    tmp_path: Path,
) -> None:
    texts = texts_of(DRAFTERS[drafter](tmp_path), prompts, tensor_parallel_size=2)
    assert [i for i in range(60) if texts[i] != expected[i]] == []
