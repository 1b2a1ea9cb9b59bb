"""numerics="fast" on the CPU: passes of many rows round q and the probabilities to bfloat16 where
processors multiply that, and quantised weights, too, where they have tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plan_builder import Driver, Sequence, prompt_ids
from transformers import LlamaForCausalLM

from gguf_files import write_gguf
from specdec_ext import LLM, SamplingParams, _core
from specdec_ext.models import load_model
from tiny_models import save_llama

VOCAB = 203
SIZES = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
HAS_TILES = _core.cpu_isa() == "amx"
HAS_PRODUCTS = HAS_TILES or _core.cpu_isa() == "avx512_bf16"
FEW, MANY = 15, 40  # rows: none takes the fast form, each format does


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "folder"
    model = LlamaForCausalLM.from_pretrained(save_llama(path, 3, VOCAB, **SIZES))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(params=["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"])
def file(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    return write_gguf(folder, tmp_path / "m.gguf", request.param, tokenizer=False)


def scores(model: Any, ids: list[int]) -> torch.Tensor:
    return Driver(model, page_size=16).scores([(Sequence(), ids)])[0]


def test_only_passes_of_many_rows_differ(file: Path) -> None:
    exact, fast = load_model(file), load_model(file, numerics="fast")
    assert (exact.numerics, fast.numerics) == ("exact", "fast" if HAS_PRODUCTS else "exact")
    assert ("many rows" in fast.info.numerics_reason) == HAS_PRODUCTS
    ids = prompt_ids(MANY, 2)
    few = slice(0, FEW)
    assert torch.equal(scores(exact, ids[few]), scores(fast, ids[few]))
    assert torch.equal(scores(exact, ids), scores(fast, ids)) != HAS_PRODUCTS


@pytest.mark.skipif(not HAS_TILES, reason="a processor without tiles")
def test_the_error_is_that_of_bfloat16(file: Path) -> None:
    """Against the same elements in float32, beside a model of them in bfloat16."""
    ids = prompt_ids(MANY, 3)
    true = scores(load_model(file, dtype="float32"), ids).double()
    fast = scores(load_model(file, numerics="fast"), ids).double()
    wide = scores(load_model(file, dtype="bfloat16"), ids).double()
    assert 0 < (fast - true).abs().max() <= 2 * (wide - true).abs().max()
    assert (fast - true).square().mean() <= 2 * (wide - true).square().mean()


def test_a_row_does_not_depend_on_its_neighbours(file: Path) -> None:
    """Only on how many there are."""
    model = load_model(file, numerics="fast")
    first, others = prompt_ids(MANY, 4), [prompt_ids(MANY, seed) for seed in (5, 6)]
    together = [
        Driver(model, page_size=16).scores([(Sequence(), first), (Sequence(), other)])[0]
        for other in others
    ]
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[0], scores(model, first)), "twice as many take the same form"


def test_text_with_drafts_of_few_rows_is_plain(file: Path) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [prompt_ids(length, length) for length in (5, 33, 70)]
    texts = []
    for config in (None, {"method": "ngram", "max_draft_len": 7, "adaptive": False}):
        with LLM(
            file, speculative_config=config, numerics="fast", max_seq_len=128, max_batch_size=1
        ) as llm:
            assert llm.engine.numerics == ("fast" if HAS_PRODUCTS else "exact")
            outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([out.outputs[0].token_ids for out in outputs])
    assert texts[0] == texts[1]


def test_floats_differ_in_their_attention_alone(folder: Path) -> None:
    """Which is fast for K/V in bfloat16."""
    assert load_model(folder, dtype="float32", numerics="fast").numerics == "exact"
    exact, fast = (load_model(folder, dtype="bfloat16", numerics=n) for n in ("exact", "fast"))
    assert fast.numerics == ("fast" if HAS_PRODUCTS else "exact")
    ids = prompt_ids(MANY, 2)
    few = slice(0, FEW)
    assert torch.equal(scores(exact, ids[few]), scores(fast, ids[few]))
    assert torch.equal(scores(exact, ids), scores(fast, ids)) != HAS_PRODUCTS
