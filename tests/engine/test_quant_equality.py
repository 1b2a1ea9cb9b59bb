"""Greedy text is plain decoding's with every drafter, for weights in every width.

Each width is a model of its own; it is compared with itself alone.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from last_tokens import LastTokens
from medusa_models import VOCAB, save_heads, save_target

from gguf_files import write_gguf
from model.redrafter_cases import random_drafter
from specdec_ext import LLM, SamplingParams, UserDrafterConfig

FORMATS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
HIDDEN = 256
TOKENS = 40
DRAFTERS = ("lookahead", "ngram", "medusa", "redrafter", "draft_target", "user")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 512, "initializer_range": 0.1}
    folder = save_target(root / "target", **sizes)
    made = {
        name: write_gguf(folder, root / f"{name}.gguf", name, tokenizer=False) for name in FORMATS
    }
    made["medusa"] = save_heads(root / "medusa", hidden=HIDDEN)
    made["redrafter"] = random_drafter(root / "redrafter", "apple", HIDDEN, VOCAB)
    return made


def config_of(drafter: str, files: dict[str, Path], format: str) -> Any:
    other = "q4_0" if format != "q4_0" else "q8_0"
    options: dict[str, dict[str, Any]] = {
        "lookahead": {"max_window_size": 4, "max_ngram_size": 4},
        "ngram": {"max_draft_len": 7},
        "medusa": {"model": str(files["medusa"])},
        "redrafter": {"model": str(files["redrafter"])},
        # The same weights with fewer bits, or more.
        "draft_target": {"model": str(files[other]), "max_draft_len": 4},
    }
    if drafter == "user":
        return UserDrafterConfig(drafter=LastTokens(), max_draft_len=5, adaptive=False)
    return {"method": drafter, "adaptive": False, **options[drafter]}


def decode(file: Path, config: Any) -> list[list[int]]:
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 5, 33, 70)]
    prompts.append(prompts[1] * 6)
    llm = LLM(file, speculative_config=config, max_batch_size=3, max_seq_len=128)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    if config is not None:
        drafted = [out.metrics["speculative_decoding"]["num_draft_tokens"] for out in outputs]
        assert sum(drafted) > 20, drafted
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {name: decode(files[name], None) for name in FORMATS}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("format", FORMATS)
def test_greedy_text_is_plain(
    format: str, drafter: str, files: dict[str, Path], plain: dict[str, list[list[int]]]
) -> None:
    assert decode(files[format], config_of(drafter, files, format)) == plain[format]


def test_widths_are_models_of_their_own(plain: dict[str, list[list[int]]]) -> None:
    """The comparison above is not one of a single text: each width says something else."""
    texts = [str(text) for text in plain.values()]
    assert len(set(texts)) == len(texts)
    for name, texts in plain.items():
        assert sum(len(set(text)) > 8 for text in texts) >= 3, name
