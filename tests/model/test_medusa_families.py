"""Medusa on other base models: any that the native decoder or the adapter runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import VOCAB
from plan_builder import prompt_ids

from specdec_ext import LLM, MedusaDecodingConfig, SamplingParams
from specdec_ext.drafters.medusa.heads import (
    MedusaHeads,
    MedusaHeadsConfig,
    save_medusa_heads,
)

FAMILIES = ["gemma2", "mistral_window", "qwen3", "smollm3", "cohere", "gpt2", "granite", "opt"]


def save_heads(folder: Path, lm_head: str) -> Path:
    ids = torch.arange(VOCAB - 1, 20, -1) if lm_head == "target" else None
    size = None if ids is None else len(ids)
    config = MedusaHeadsConfig(64, VOCAB, 4, lm_head=lm_head, draft_vocab_size=size)
    heads = MedusaHeads(config, ids)
    generator = torch.Generator().manual_seed(4)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    return save_medusa_heads(folder, heads, dtype="float16")


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_that_of_plain_decoding(saved: Any, tmp_path: Path, family: str) -> None:
    folder = saved(family).folder
    prompts = [prompt_ids(length, seed) for seed, length in enumerate((1, 9, 30))]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    options = {"scheduler_config": {"max_batch_size": 2, "max_seq_len": 120}}
    texts = []
    for lm_head in (None, "own", "target"):
        config = None
        if lm_head is not None:
            heads = save_heads(tmp_path / lm_head, lm_head)
            config = MedusaDecodingConfig(heads, "zephyr_stage2", adaptive=False)
        with LLM(folder, speculative_config=config, **options) as llm:
            assert llm.model.numerics == "exact"
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([list(out.outputs[0].token_ids) for out in outputs])
            if config is not None:
                stats = llm.get_metrics()["drafter"]
                assert stats["failures"] == 0 and stats["num_proposals"] > 15
    assert texts[1] == texts[0] and texts[2] == texts[0]
