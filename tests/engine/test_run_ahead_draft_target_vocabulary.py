"""Draft models that run ahead with fewer, more or other scores than the target, and their pages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from draft_target_cases import GREEDY, PROMPTS, SAMPLED, VOCAB, make_model
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain
from test_draft_target_vocabulary import reduced, write_tokenizer
from test_run_ahead_draft_target import drafter_of, open_ahead, run
from test_run_ahead_draft_target_sampling import REJECTION, mixed

from emulators import EMULATED
from specdec_ext import ConfigError

pytestmark = pytest.mark.usefixtures("on_stream")

PLACES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda-emu-fast", marks=EMULATED)])


@PLACES
@pytest.mark.parametrize("size", [VOCAB - 5, VOCAB + 8])
def test_vocabularies_may_differ_in_their_padding(
    folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, size: int, device: str
) -> None:
    target = tmp_path / "target"
    shutil.copytree(folders["target"], target)
    draft = make_model(tmp_path / "draft", 21, vocab_size=size)
    pair = {"target": target, "draft": draft}
    with pytest.raises(ConfigError, match=f"has {size} tokens, the target's {VOCAB}"):
        open_ahead(pair, "draft", 1, device=device)
    words = [f"w{i}" for i in range(VOCAB - 5)]
    write_tokenizer(target, words)
    write_tokenizer(draft, words)
    n = 4 if device != "cpu" else len(PROMPTS)
    for params, kind in ((GREEDY, "greedy"), (SAMPLED, "sampled")):
        with open_ahead(pair, "draft", 1, device=device) as llm:
            assert run(llm, PROMPTS[:n], params) == plain[kind][:n]
            run(llm, PROMPTS[:n], REJECTION)
            assert llm.get_metrics()["speculative_decoding"]["num_draft_tokens"] > 100


@pytest.mark.parametrize("device", [pytest.param("cuda-emu-fast", marks=EMULATED)])
def test_a_reduced_head_on_a_device_draws_what_it_draws_on_the_cpu(
    folders: dict[str, Path], tmp_path: Path, device: str
) -> None:
    path = reduced(folders, tmp_path / "draft", list(range(0, VOCAB, 2)), tied=False)
    texts = []
    for place in ("cpu", device):
        with open_ahead({**folders, "half": path}, "half", 1, device=place) as llm:
            texts.append(mixed(llm))
    assert texts[0] == texts[1]


@PLACES
def test_a_draft_page_for_every_page(folders: dict[str, Path], device: str) -> None:
    cache = {"tokens_per_block": 16}
    with open_ahead(folders, "deep", 1, kv_cache_config=cache, device=device) as llm:
        memory = llm.get_metrics()["memory"]
        pages = drafter_of(llm).pages
        held = sum(pool.numel() * pool.element_size() for pool in pages)
        stats = llm.get_metrics()["drafter"]
    assert pages[0].shape[1] == memory["draft_num_pages"] == memory["num_pages"]
    assert memory["draft_pool_bytes"] == held <= stats["memory_bytes"]
    assert stats["device"] == llm.device
