"""Tiny models, prompts and plain texts of the tests of LLM(device=...)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from medusa_models import save_heads

from specdec_ext import LLM, SamplingParams
from specdec_ext.drafters.redrafter.model import Redrafter, RedrafterShape, save_redrafter
from tiny_models import save_llama

VOCAB = 48
# Texts of different lengths, some of which repeat themselves.
PROMPTS = [[5, 9, 2, 9, 2, 9, 2], [7], list(range(40, 4, -1)), [3, 1, 4, 3, 1, 4, 3, 1]]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, top_p=0.95, seed=5)


def save_models(root: Path) -> dict[str, Path]:
    """A target, another model of its vocabulary, Medusa heads and a ReDrafter for it."""
    torch.manual_seed(4)
    drafter = Redrafter(RedrafterShape(VOCAB, 32, 64, 1, True))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_redrafter(drafter, root / "redrafter", dtype=torch.float32)
    return {
        "target": save_llama(root / "target", 11, VOCAB),
        "other": save_llama(root / "other", 12, VOCAB, num_hidden_layers=1),
        "heads": save_heads(root / "heads"),
        "redrafter": root / "redrafter",
    }


def open_llm(folders: dict[str, Path], device: str, spec: Any = None, **options: Any) -> LLM:
    limits = {"max_batch_size": 3, "max_seq_len": 96, "max_num_tokens": 48}
    settings: dict[str, Any] = {
        "scheduler_config": limits,
        "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 512},
    }
    return LLM(folders["target"], device=device, speculative_config=spec, **{**settings, **options})


def tokens_of(outputs: Any) -> list[list[int]]:
    assert [out.outputs[0].finish_reason for out in outputs] == ["length"] * len(outputs)
    return [list(out.outputs[0].token_ids) for out in outputs]


def plain_texts(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What the CPU's decoder gives without speculation."""
    with open_llm(folders, "cpu") as llm:
        return {
            "greedy": tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)),
            "sampled": tokens_of(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)),
        }
